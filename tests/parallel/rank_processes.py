"""Processes that tests tell to be ranks."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from collections.abc import Callable
from multiprocessing.connection import Connection
from multiprocessing.reduction import send_handle
from pathlib import Path
from typing import Any

from engine.parallel.shared_memory import allocate

HERE = Path(__file__).parent


class RankProcess:
    """A worker (`rank_worker.py`) that takes one command at a time."""

    def __init__(self) -> None:
        ours, its = socket.socketpair()
        environment = {**os.environ, "PYTHONPATH": str(HERE.parents[1]), "TORCHINDUCTOR_COMPILE_THREADS": "1"}
        command = [sys.executable, str(HERE / "rank_worker.py"), str(its.fileno())]
        self.process = subprocess.Popen(command, pass_fds=[its.fileno()], env=environment)
        its.close()
        self._pipe = Connection(ours.detach())

    def send(self, name: str, *arguments: object) -> None:
        self._pipe.send((name, arguments))

    def join(self, fd: int, name: str, rank: int, size: int, cache_dir: Path, make_group: str) -> None:
        self.send("join", name, rank, size, cache_dir, make_group)
        send_handle(self._pipe, fd, self.process.pid)

    def answers(self, timeout_s: float) -> bool:
        return self._pipe.poll(timeout_s)

    def result(self) -> Any:
        assert self.answers(100), "the rank hangs"
        good, result = self._pipe.recv()
        if not good:
            raise RuntimeError(result)
        return result

    def end(self) -> None:
        self._pipe.close()
        self.process.kill()
        self.process.wait()


class Ranks:
    """Processes that are ranks of a group; the descriptor of its memory."""

    def __init__(self, processes: list[RankProcess], fd: int) -> None:
        self.processes = processes
        self.fd = fd

    def all(self, name: str, *arguments: object) -> list[Any]:
        for process in self.processes:
            process.send(name, *arguments)
        return [process.result() for process in self.processes]


class Workers:
    """Processes for groups, which are started when one is wanted and serve one group after another."""

    def __init__(
        self,
        cache_dir: Path,
        make_group: str = "engine.parallel.shared_memory:SharedGroup",
        allocate: Callable[[int, int], int] = allocate,
    ) -> None:
        """`make_group`: "module:callable" of an `engine.executor.rank.MakeGroup`."""
        self._cache_dir = cache_dir
        self._make_group, self._allocate = make_group, allocate
        self._processes: list[RankProcess] = []
        self._fds: list[int] = []

    def group(self, size: int, slot_bytes: int = 1 << 16) -> Ranks:
        self._processes = [process for process in self._processes if process.process.poll() is None]
        while len(self._processes) < size:
            self._processes.append(RankProcess())
        fd = self._allocate(size, slot_bytes)
        self._fds.append(fd)
        ranks = Ranks(self._processes[:size], fd)
        for rank, process in enumerate(ranks.processes):
            process.join(fd, f"group-{len(self._fds)}", rank, size, self._cache_dir, self._make_group)
        for process in ranks.processes:
            process.result()
        return ranks

    def end(self) -> None:
        for process in self._processes:
            process.end()
        for fd in self._fds:
            os.close(fd)
