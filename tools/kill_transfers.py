"""A prefill server, a decode server and a router, each a process: they are killed and stopped, and requests are left,
at random moments of requests.

What the router answers must be the tokens of one engine, as long as the decode server lives; in the end neither server
holds a block. Prints JSON. Usage: ``python tools/kill_transfers.py [--rounds 30] [--seed 0]`` (a model of random
weights, written to a temporary folder).
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
from collections import Counter
from pathlib import Path
from random import Random

import httpx

sys.path.append(str(Path(__file__).parents[1] / "tests" / "end_to_end"))

from tiny_families import save_tiny  # type: ignore[import-not-found]  # of the tests

MODES = ("nothing", "kill prefill", "stop prefill", "kill decode", "leave", "leave", "leave", "nothing")
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
                if httpx.get(f"{self.url}/health", timeout=2).status_code == 200:
                    return
            except httpx.HTTPError:
                time.sleep(0.1)
        raise TimeoutError(f"{self._arguments} is not ready")

    def core(self) -> int:
        """Its core's process, or its own."""
        children = Path(f"/proc/{self.popen.pid}/task/{self.popen.pid}/children").read_text().split()
        return int(children[0]) if children else self.popen.pid

    def kill(self, core: bool) -> None:
        os.kill(self.core() if core else self.popen.pid, signal.SIGKILL)
        self.popen.wait()

    def metric(self, name: str) -> float:
        text = httpx.get(f"{self.url}/metrics", timeout=5).text
        found = re.search(rf"^{name}(?:{{[^}}]*}})? ([0-9.e+-]+)$", text, re.MULTILINE)
        assert found, name
        return float(found.group(1))

    def close(self) -> None:
        self.popen.terminate()
        self.popen.wait()


class Chaos:
    def __init__(self, model: str, random: Random) -> None:
        self.random, self.counts = random, Counter[str]()
        shared = (model, "--compile", "none", "--threads", "1", "--max-model-len", "512", *LIMITS)
        self.prefill = Process("--role", "prefill", *shared)
        self.decode = Process("--role", "decode", "--swap-space", "64MiB", *shared)
        self.prefill.wait_ready()
        self.decode.wait_ready()
        self.router = Process("--role", "router", "--prefill", self.prefill.url, "--decode", self.decode.url)
        self.router.wait_ready()

    def round(self, mode: str) -> None:
        prompt = [self.random.randrange(3, 90) for _ in range(self.random.randrange(20, 400))]
        body = {"prompt": prompt, "max_tokens": 30, "temperature": 0, "ignore_eos": True}
        answered: list[httpx.Response | Exception] = []
        asking = threading.Thread(target=self._ask, args=(body, mode == "leave", answered))
        asking.start()
        time.sleep(self.random.random() * 0.3)
        core = self.random.random() < 0.5
        if mode == "kill prefill":
            self.prefill.kill(core)
        elif mode == "kill decode":
            self.decode.kill(core)
        elif mode == "stop prefill":
            stopped = self.prefill.core() if core else self.prefill.popen.pid
            os.kill(stopped, signal.SIGSTOP)
            time.sleep(5 if not core else 2)
            os.kill(stopped, signal.SIGCONT)
        asking.join()
        for server in (self.prefill, self.decode):
            if server.popen.poll() is not None:
                server.start()
                server.wait_ready()
        (found,) = answered
        self.counts[mode] += 1
        if mode == "leave" or (mode == "kill decode" and not _well(found)):
            return
        assert isinstance(found, httpx.Response) and found.status_code == 200, (mode, found)
        alone = httpx.post(f"{self.decode.url}/v1/completions", json={**body, "cache_salt": "alone"}, timeout=60)
        assert found.json()["choices"][0]["text"] == alone.json()["choices"][0]["text"], mode
        self.counts["right"] += 1

    def _ask(self, body: dict[str, object], leaves: bool, answered: list[httpx.Response | Exception]) -> None:
        seconds = self.random.random() * 0.3 + 0.01 if leaves else 120
        try:
            answered.append(httpx.post(f"{self.router.url}/v1/completions", json=body, timeout=seconds))
        except httpx.HTTPError as error:
            answered.append(error)

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

    def close(self) -> None:
        for process in (self.router, self.prefill, self.decode):
            process.close()


def _well(found: httpx.Response | Exception) -> bool:
    return isinstance(found, httpx.Response) and found.status_code == 200


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0] if __doc__ else None)
    parser.add_argument("--rounds", type=int, default=30)
    parser.add_argument("--seed", type=int, default=0)
    asked = parser.parse_args()
    random = Random(asked.seed)
    with tempfile.TemporaryDirectory() as folder:
        save_tiny("Llama", Path(folder))
        chaos = Chaos(folder, random)
        try:
            for _ in range(asked.rounds):
                chaos.round(random.choice(MODES))
            left = chaos.left()
            fetched = chaos.decode.metric("pageloom_kv_fetches_total")
            failed = chaos.decode.metric("pageloom_kv_fetch_failures_total")
        finally:
            chaos.close()
    told = {"rounds": asked.rounds, "counts": dict(chaos.counts), "left": left}
    print(json.dumps({**told, "since the last start": {"fetched": fetched, "failed": failed}}))


if __name__ == "__main__":
    main()
