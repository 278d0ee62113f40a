"""An engine as an OpenAI-compatible server, loaded by the same client for all (`entrypoints.bench.http_load`)."""

from __future__ import annotations

import argparse
import asyncio
import socket
import time
from collections.abc import Mapping, Sequence
from typing import Any, NoReturn

import httpx

from engine.errors import EngineError
from entrypoints.bench.http_load import LoadClient, wait_compiled
from entrypoints.bench.metrics import Figures
from entrypoints.bench.workloads import workload as requests_of
from peers.process import EngineFailedError, ProcessTree
from peers.worker import FIRST_TOKEN_PROMPT

REQUEST_TIMEOUT_S = 120.0


def free_port() -> int:
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        return int(s.getsockname()[1])


class Server:
    """`command` with `--port N` appended. Raises `EngineFailedError` when no token came in time."""

    def __init__(self, command: Sequence[str], environment: Mapping[str, str], timeout_s: float) -> None:
        port = free_port()
        self._base = f"http://127.0.0.1:{port}"
        self._tree = ProcessTree([*command, "--host", "127.0.0.1", "--port", str(port)], environment, piped=False)
        self._model = self._first_token(timeout_s)
        self.startup_s = time.perf_counter() - self._tree.started
        self.versions: dict[str, str] = {}
        self.facts: dict[str, Any] = {"over": "HTTP", "model": self._model}

    def measure(self, workload: str, repeat: int, timeout_s: float) -> Figures:
        try:
            wait_compiled(argparse.Namespace(base_url=self._base, api_key=None))
            return asyncio.run(asyncio.wait_for(self._load(workload, repeat, timeout_s), timeout_s))
        except TimeoutError:
            self._fail(f"did not finish {workload} within {timeout_s:.0f} s")
        except (EngineError, httpx.HTTPError) as error:
            if not self._tree.alive:
                self._fail(f"exited with status {self._tree.process.poll()} ({workload})")
            raise EngineFailedError(str(error)) from error

    def pause(self) -> None:
        self._tree.pause()

    def resume(self) -> None:
        self._tree.resume()

    def peak_memory_bytes(self) -> int:
        return self._tree.peak_memory_bytes()

    def stop(self) -> None:
        self._tree.stop()

    async def _load(self, workload: str, repeat: int, timeout_s: float) -> Figures:
        from tqdm import tqdm

        options = argparse.Namespace(base_url=self._base, api_key=None, extra_body={}, max_concurrency=None)
        requests = requests_of(workload, repeat)
        limits = httpx.Limits(max_connections=None, max_keepalive_connections=0)
        with tqdm(total=len(requests), disable=True) as bar:
            async with httpx.AsyncClient(timeout=timeout_s, limits=limits, trust_env=False) as client:
                return await LoadClient(options, self._model).run(client, requests, bar)

    def _first_token(self, timeout_s: float) -> str:
        """The served model's name, once it has generated a token."""
        last = "nothing answered"
        while True:
            if time.perf_counter() - self._tree.started > timeout_s:
                self._fail(f"served no token within {timeout_s:.0f} s ({last})")
            if not self._tree.alive:
                self._fail(f"exited with status {self._tree.process.poll()} before it served")
            try:
                with httpx.Client(timeout=REQUEST_TIMEOUT_S, trust_env=False) as client:
                    listed = client.get(f"{self._base}/v1/models").raise_for_status().json()
                    name = str(listed["data"][0]["id"])
                    body = {"model": name, "prompt": FIRST_TOKEN_PROMPT, "max_tokens": 1, "temperature": 0}
                    client.post(f"{self._base}/v1/completions", json=body).raise_for_status()
                    return name
            except (httpx.HTTPError, ValueError, KeyError, IndexError) as error:
                last = repr(error)
            time.sleep(0.05)

    def _fail(self, what: str) -> NoReturn:
        tail = self._tree.log_tail()
        self.stop()
        raise EngineFailedError(f"{what}; it last printed: {tail}" if tail else what)
