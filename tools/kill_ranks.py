"""Real servers of a tiny model, of every layout (ranks, stages, both, replicas, prefill apart from decode), with
requests running: a random process of theirs is killed or stopped at a random moment.

Told is what comes first: a line of the log, a health that is not well or does not answer, or the end of all that a
killed front end had. Who may go on is let go on, and then serves. Prints JSON: for each layout, victim and signal how
long it took until it was told, in seconds; requests by what became of them ("hung" is one that did not end in
`HANG_S`); processes and files in shared memory that are left.
Usage: ``python tools/kill_ranks.py [--rounds 100] [--layouts tp,pp] [--seed 0]``.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import signal
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections import Counter, defaultdict
from contextlib import suppress
from pathlib import Path
from random import Random

import httpx
import psutil

sys.path.append(str(Path(__file__).parents[1] / "tests" / "end_to_end"))

from serving import free_port  # type: ignore[import-not-found]  # of the tests
from tiny_families import save_tiny  # type: ignore[import-not-found]  # of the tests

HANG_S, START_S = 60.0, 300.0
PROBE_S = 0.5
LAYOUTS: dict[str, tuple[str, ...]] = {
    "tp": ("-tp", "2"),
    "pp": ("-pp", "2"),
    "tp x pp": ("-tp", "2", "-pp", "2"),
    "dp": ("-dp", "2"),
    "dp x tp": ("-dp", "2", "-tp", "2"),
    "pd": (),
}
_TOLD = re.compile(r"was lost|died|killed by signal|stopped by a signal|is not running|server http\S+: ")
_ROLES = {"engine.core.process": "core", "engine.executor.worker": "rank"}
PROMPTS = [[3 + (7 * row + 11 * place) % 200 for place in range(20 + 30 * row)] for row in range(6)]


class Server:
    """A process with all that it starts; what it says is kept with the time."""

    def __init__(self, *arguments: str) -> None:
        self.url = f"http://127.0.0.1:{(port := free_port())}"
        command = [sys.executable, "-m", "entrypoints.serve", "--port", str(port), "--log-level", "warning", *arguments]
        self.popen = subprocess.Popen(command, stderr=subprocess.PIPE, text=True)
        self.lines: list[tuple[float, str]] = []
        self.seen: dict[int, psutil.Process] = {}
        threading.Thread(target=self._listen, daemon=True).start()

    def _listen(self) -> None:
        assert self.popen.stderr is not None
        for line in self.popen.stderr:
            self.lines.append((time.monotonic(), line))

    def health(self, timeout_s: float = PROBE_S) -> httpx.Response | None:
        """None: it does not answer."""
        try:
            return httpx.get(f"{self.url}/health", timeout=timeout_s)
        except httpx.HTTPError:
            return None

    def is_well(self, timeout_s: float = PROBE_S) -> bool:
        answer = self.health(timeout_s)
        return answer is not None and answer.status_code == 200 and b"false" not in answer.content

    def processes(self) -> list[tuple[str, psutil.Process]]:
        front = psutil.Process(self.popen.pid)
        found = [("front end", front)]
        for child in front.children(recursive=True):
            role = next((role for name, role in _ROLES.items() if any(name in word for word in child.cmdline())), None)
            found += [(role, child)] if role is not None else []
        self.seen |= {process.pid: process for _, process in found}
        return found

    def close(self) -> None:
        self.popen.terminate()
        try:
            self.popen.wait(30)
        except subprocess.TimeoutExpired:
            self.popen.kill()
            raise


def runs(process: psutil.Process) -> bool:
    with suppress(psutil.NoSuchProcess):
        return process.is_running() and bool(process.status() != psutil.STATUS_ZOMBIE)
    return False


def until(condition: object, what: str, limit_s: float = HANG_S) -> None:
    assert callable(condition)
    began = time.monotonic()
    while not condition():
        if time.monotonic() - began > limit_s:
            raise TimeoutError(what)
        time.sleep(0.005)


class Site:
    """The servers of a layout, and clients who ask the last one all the time."""

    def __init__(self, layout: str, model: str) -> None:
        shared = (model, "--compile", "none", "--threads", "1", "--max-model-len", "512", "--kv-cache-memory", "8MiB")
        if layout == "pd":
            limits = ("--limit", "kv_fetch_s=1", "--limit", "kv_lease_s=3")
            ends = [Server(*shared, *limits, "--role", role) for role in ("prefill", "decode")]
            urls = [word for end, role in zip(ends, ("--prefill", "--decode"), strict=True) for word in (role, end.url)]
            self.servers = [*ends, Server("--role", "router", *urls)]
        else:
            self.servers = [Server(*shared, *LAYOUTS[layout])]
        self.layout, self.counts = layout, Counter[str]()
        self._asking = False
        self._threads: list[threading.Thread] = []

    def start(self) -> None:
        for server in self.servers:
            until(lambda server=server: server.is_well(5), f"{self.layout}: it does not start", START_S)
            server.processes()

    def begin(self) -> None:
        self._asking = True
        self._threads = [threading.Thread(target=self._ask, args=(index,)) for index in range(3)]
        for thread in self._threads:
            thread.start()

    def end(self) -> None:
        self._asking = False
        for thread in self._threads:
            thread.join()

    def _ask(self, index: int) -> None:
        with httpx.Client(timeout=HANG_S) as client:
            while self._asking:
                index += 1
                body = {"prompt": PROMPTS[index % len(PROMPTS)], "max_tokens": 40, "temperature": 0, "ignore_eos": True}
                try:
                    answer = client.post(f"{self.servers[-1].url}/v1/completions", json=body)
                    self.counts[str(answer.status_code)] += 1
                except httpx.TimeoutException:
                    self.counts["hung"] += 1
                except httpx.HTTPError:
                    self.counts["left"] += 1
                    time.sleep(0.05)

    def round(self, random: Random, told: dict[str, list[float]]) -> bool:
        """Whether it goes on to serve."""
        self.begin()
        time.sleep(0.5 + random.random())
        server = random.choice(self.servers)
        kind, victim = random.choice(server.processes())
        name = f"{self.layout}: {_name_of(self, server)}{kind}"
        number = random.choice((signal.SIGKILL, signal.SIGSTOP))
        began = time.monotonic()
        victim.send_signal(number)
        try:
            until(lambda: self._told(server, kind, number, began), f"{name}, {number.name}: nobody is told")
            told[f"{name}, {number.name}"].append(time.monotonic() - began)
            print(f"{name}, {number.name}: {time.monotonic() - began:.3f} s", file=sys.stderr, flush=True)
            time.sleep(random.random())
        finally:
            if number is signal.SIGSTOP:
                with suppress(psutil.NoSuchProcess):
                    victim.send_signal(signal.SIGCONT)
            self.end()
        loses_replica = self.layout.startswith("dp") and kind != "front end"
        if loses_replica and (kind == "rank" or number is signal.SIGKILL):
            httpx.post(f"{server.url}/scale_elastic_ep", json={"new_data_parallel_size": 2}, timeout=HANG_S)
        goes_on = loses_replica or (number is signal.SIGSTOP and kind != "rank")
        if goes_on:
            for each in self.servers:
                until(lambda each=each: each.is_well(5), f"{name}, {number.name}: it does not go on")
        return goes_on

    def _told(self, server: Server, kind: str, number: signal.Signals, began: float) -> bool:
        if kind == "front end" and number is signal.SIGKILL:
            return not any(runs(process) for process in server.seen.values())
        said = any(
            at > began and _TOLD.search(line) for each in self.servers for at, line in [*each.lines] if each is not None
        )
        return said or server.popen.poll() is not None or not server.is_well()

    def close(self) -> int:
        """How many processes are left."""
        for server in self.servers:
            server.close()
        seen = [process for server in self.servers for process in server.seen.values()]
        with suppress(TimeoutError):
            until(lambda: not any(runs(process) for process in seen), "processes are left")
        return sum(runs(process) for process in seen)


def _name_of(site: Site, server: Server) -> str:
    return "" if len(site.servers) == 1 else f"{('prefill', 'decode', 'router')[site.servers.index(server)]}'s "


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0] if __doc__ else None)
    parser.add_argument("--rounds", type=int, default=100)
    parser.add_argument("--layouts", default=",".join(LAYOUTS))
    parser.add_argument("--seed", type=int, default=0)
    asked = parser.parse_args()
    random, before = Random(asked.seed), set(os.listdir("/dev/shm"))
    told, counts, left = defaultdict[str, list[float]](list), Counter[str](), 0
    layouts = asked.layouts.split(",")
    with tempfile.TemporaryDirectory() as model:
        save_tiny("Llama", Path(model))
        for index, layout in enumerate(layouts):
            rounds = (asked.rounds + index) // len(layouts)
            while rounds:
                site = Site(layout, model)
                try:
                    site.start()
                    goes_on = True
                    while rounds and goes_on:
                        rounds -= 1
                        goes_on = site.round(random, told)
                finally:
                    left += site.close()
                counts += site.counts
            print(layout, dict(counts), file=sys.stderr, flush=True)
    every = [seconds for each in told.values() for seconds in each]
    figures = {name: {"times": len(each), "max_s": round(max(each), 2)} for name, each in sorted(told.items())}
    total = {
        "rounds": len(every),
        "median_s": round(statistics.median(every), 3),
        "max_s": round(max(every), 3),
        "within_1_s": sum(seconds <= 1 for seconds in every),
        "requests": dict(counts),
        "processes_left": left,
        "files_left": len(set(os.listdir("/dev/shm")) - before),
    }
    print(json.dumps({**total, "told": figures}))


if __name__ == "__main__":
    main()
