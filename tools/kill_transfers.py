"""A prefill server, a decode server and a router, each a process: clients ask all the time and leave at random moments,
while the servers are killed, stopped and started again.

What the router answers must be the tokens of one engine, as long as the decode server lives. After every tenth kill,
and in the end, clients wait until neither server holds a block. Prints JSON. Usage: ``python tools/kill_transfers.py
[--kills 20] [--seed 0] [--nixl]`` (a model of random weights, written to a temporary folder). A kill takes as long as a
server's start; some hundred requests are left meanwhile.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
import uuid
from collections import Counter
from pathlib import Path
from random import Random

import httpx

sys.path.append(str(Path(__file__).parents[1] / "tests" / "end_to_end"))

from tiny_families import save_tiny  # type: ignore[import-not-found]  # of the tests

MODES = ("kill prefill", "kill decode", "kill prefill", "kill decode", "stop prefill")
CLIENTS, PROMPTS, SETTLED_EVERY = 2, 24, 10
LIMITS = ("--limit", "kv_fetch_s=1", "--limit", "kv_lease_s=3")


class Process:
    def __init__(self, *arguments: str) -> None:
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            self.port = probe.getsockname()[1]
        self.url, self._arguments = f"http://127.0.0.1:{self.port}", arguments
        self.start()

    def start(self) -> None:
        command = [sys.executable, "-m", "entrypoints.serve", "--port", str(self.port), "--log-level", "error"]
        self.popen = subprocess.Popen([*command, *self._arguments], start_new_session=True)

    def wait_ready(self) -> None:
        deadline = time.monotonic() + 120
        while time.monotonic() < deadline:
            try:
                if httpx.get(f"{self.url}/ready", timeout=2).status_code == 200:
                    return
            except httpx.HTTPError:
                pass
            time.sleep(0.05)
        raise TimeoutError(f"{self._arguments} is not ready")

    def core(self) -> int:
        """Its core's process, or its own."""
        return next(iter(self._children()), self.popen.pid)

    def _children(self) -> list[int]:
        tasks = Path(f"/proc/{self.popen.pid}/task").glob("*/children")
        return sorted(int(child) for task in tasks for child in task.read_text().split())

    def kill(self, core: bool) -> None:
        """Returns when it serves again: its core, which it starts anew, or all of it."""
        if core:
            before = self._children()
            os.kill(before[0], signal.SIGKILL)
            deadline = time.monotonic() + 120
            while before[0] in (now := self._children()) or len(now) < len(before):
                if time.monotonic() > deadline:
                    raise TimeoutError(f"{self._arguments} started no core")
                time.sleep(0.05)
        else:
            self.popen.kill()
            self.popen.wait()
            self.start()
        self.wait_ready()

    def metric(self, name: str) -> float:
        text = httpx.get(f"{self.url}/metrics", timeout=5).text
        found = re.search(rf"^{name}(?:{{[^}}]*}})? ([0-9.e+-]+)$", text, re.MULTILINE)
        assert found, name
        return float(found.group(1))

    def close(self) -> None:
        self.popen.terminate()
        self.popen.wait()


class Clients:
    """Ask the router, each for a prompt at a time; half of them leave. Salts make sure that pages travel."""

    def __init__(self, router: str, expected: dict[tuple[int, ...], str], seed: int) -> None:
        self._url, self._expected = router, expected
        self._go, self._end = threading.Event(), threading.Event()
        self._busy = [threading.Lock() for _ in range(CLIENTS)]
        self.decode_lives, self.decode_lost = True, 0
        """set by who kills it"""
        self.counts, self.wrong = Counter[str](), list[str]()
        self._threads = [threading.Thread(target=self._run, args=(i, Random(seed + i))) for i in range(CLIENTS)]
        for thread in self._threads:
            thread.start()

    def go(self) -> None:
        self._go.set()

    def pause(self) -> None:
        """Returns when all have ended what they had begun."""
        self._go.clear()
        for lock in self._busy:
            with lock:
                pass

    def close(self) -> None:
        self._end.set()
        self._go.set()
        for thread in self._threads:
            thread.join()

    def _run(self, index: int, random: Random) -> None:
        with httpx.Client(base_url=self._url, limits=httpx.Limits(max_keepalive_connections=0)) as http:
            while not self._end.is_set():
                self._go.wait()
                with self._busy[index]:
                    if self._go.is_set() and not self._end.is_set():
                        self._ask(http, random)

    def _ask(self, http: httpx.Client, random: Random) -> None:
        prompt, leaves = random.choice(list(self._expected)), random.random() < 0.5
        sure, lost = self.decode_lives, self.decode_lost
        answer, why = None, ""
        try:
            seconds = random.random() * 0.15 if leaves else 120
            answer = http.post("/v1/completions", json=_body(prompt, uuid.uuid4().hex), timeout=seconds)
        except httpx.TimeoutException as error:
            if leaves:
                self.counts["left"] += 1
                return
            why = repr(error)
        except httpx.HTTPError as error:  # an answer that ends amid it
            why = repr(error)
        well = answer is not None and answer.status_code == 200
        if answer is not None and well and answer.json()["choices"][0]["text"] == self._expected[prompt]:
            self.counts["right"] += 1
        elif not well and not (sure and lost == self.decode_lost):
            self.counts["lost with the decode server"] += 1
            time.sleep(0.2)
        else:
            self.wrong.append(why if answer is None else answer.text)


class Chaos:
    def __init__(self, model: str, random: Random, nixl: bool) -> None:
        self.random, self.counts = random, Counter[str]()
        self.settled, self.fetched, self.failed = 0, 0.0, 0.0
        shared = [model, "--compile", "none", "--threads", "1", "--max-model-len", "512", *LIMITS]
        shared += ["--core-restarts", "100"]
        shared += ["--dtype", "float32"]  # in bf16 near ties fall otherwise where the last tokens are computed alone
        if nixl:
            shared += ["--kv-transfer-config", '{"kv_connector_extra_config": {"backends": ["UCX"]}}']
        self.prefill = Process("--role", "prefill", *shared)
        self.decode = Process("--role", "decode", "--swap-space", "64MiB", *shared)
        self.prefill.wait_ready()
        self.decode.wait_ready()
        self.router = Process("--role", "router", "--prefill", self.prefill.url, "--decode", self.decode.url)
        self.router.wait_ready()
        prompts = [tuple(random.randrange(3, 90) for _ in range(random.randrange(20, 400))) for _ in range(PROMPTS)]
        self.clients = Clients(
            self.router.url, {each: self._alone(each) for each in prompts}, random.randrange(1 << 30)
        )

    def _alone(self, prompt: tuple[int, ...]) -> str:
        answer = httpx.post(f"{self.decode.url}/v1/completions", json=_body(prompt, "alone"), timeout=60)
        return str(answer.json()["choices"][0]["text"])

    def round(self, mode: str) -> None:
        """Clients ask meanwhile."""
        what, whom = mode.split()
        server = self.prefill if whom == "prefill" else self.decode
        core = self.random.random() < 0.5
        time.sleep(4 * self.random.random())  # pages travel while both live
        if what == "stop":
            stopped = server.core() if core else server.popen.pid
            os.kill(stopped, signal.SIGSTOP)
            time.sleep(2)
            os.kill(stopped, signal.SIGCONT)
        else:
            if server is self.decode:
                self._count_fetches()
                self.clients.decode_lives = False
                self.clients.decode_lost += 1
            server.kill(core)
            self.clients.decode_lives = True
        self.counts[mode] += 1

    def settle(self) -> None:
        """Raises `AssertionError` where a block is held that nobody asked for, or an answer was wrong."""
        self.clients.pause()
        held = self.left()
        assert not any(held.values()), (held, self.told())
        assert not self.clients.wrong, (self.clients.wrong, self.told())
        self.settled += 1
        self.clients.go()

    def left(self) -> dict[str, float]:
        """What the servers hold when nobody asks them anything."""
        names = ("kv_leases", "kv_cache_usage_ratio", "num_requests_running", "num_requests_waiting")
        deadline = time.monotonic() + 20
        while True:
            held = {f"prefill {name}": self.prefill.metric(f"pageloom_{name}") for name in names}
            more = (*names[1:], "host_kv_blocks_used")
            held |= {f"decode {name}": self.decode.metric(f"pageloom_{name}") for name in more}
            if not any(held.values()) or time.monotonic() > deadline:
                return held
            time.sleep(0.2)

    def _count_fetches(self) -> None:
        """Before a decode server is killed, which knows them."""
        self.fetched += self.decode.metric("pageloom_kv_fetches_total")
        self.failed += self.decode.metric("pageloom_kv_fetch_failures_total")

    def told(self) -> dict[str, object]:
        self._count_fetches()
        fetches = {"came": self.fetched, "failed": self.failed}
        return {**self.counts, "clients": self.clients.counts, "fetches": fetches, "no block left": self.settled}

    def close(self) -> None:
        self.clients.close()
        for process in (self.router, self.prefill, self.decode):
            process.close()


def _body(prompt: tuple[int, ...], salt: str) -> dict[str, object]:
    return {"prompt": prompt, "max_tokens": 30, "temperature": 0, "ignore_eos": True, "cache_salt": salt}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0] if __doc__ else None)
    parser.add_argument("--kills", type=int, default=20)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--nixl", action="store_true", help="pages by NIXL")
    asked = parser.parse_args()
    random, began = Random(asked.seed), time.monotonic()
    with tempfile.TemporaryDirectory() as folder:
        save_tiny("Llama", Path(folder))
        chaos = Chaos(folder, random, asked.nixl)
        try:
            chaos.clients.go()
            for index in range(asked.kills):
                chaos.round(random.choice(MODES))
                if index % SETTLED_EVERY == SETTLED_EVERY - 1:
                    chaos.settle()
            chaos.settle()
            told = chaos.told()
        finally:
            chaos.close()
    print(json.dumps({**told, "seconds": round(time.monotonic() - began)}))


if __name__ == "__main__":
    main()
