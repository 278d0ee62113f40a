"""Processes that tests tell to be ranks."""

from __future__ import annotations

import itertools
import os
import socket
import subprocess
import sys
from collections.abc import Callable, Sequence
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

    def join_by_sockets(self, streams: Sequence[socket.socket | None], name: str, rank: int, cache_dir: Path) -> None:
        """`streams` to each rank; None at its own place."""
        self.send("join_by_sockets", name, rank, [stream is not None for stream in streams], cache_dir)
        for stream in streams:
            if stream is not None:
                send_handle(self._pipe, stream.fileno(), self.process.pid)

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
    """Processes that are ranks of a group; the descriptor of its memory, if it has one."""

    def __init__(self, processes: list[RankProcess], fd: int = -1) -> None:
        self.processes = processes
        self.fd = fd

    def all(self, name: str, *arguments: object) -> list[Any]:
        for process in self.processes:
            process.send(name, *arguments)
        return [process.result() for process in self.processes]


def connected() -> tuple[socket.socket, socket.socket]:
    """Both ends of a stream over this host's network."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        ours = socket.create_connection(server.getsockname())
        theirs, _ = server.accept()
    for end in (ours, theirs):
        end.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    return ours, theirs


class Workers:
    """Processes for groups, which are started when one is wanted and serve one group after another."""

    def __init__(
        self,
        cache_dir: Path,
        make_group: str = "engine.parallel.shared_memory:SharedGroup",
        allocate: Callable[[int, int], int] = allocate,
    ) -> None:
        """`make_group`: "module:callable" of an `engine.executor.joining.MakeGroup`."""
        self._cache_dir = cache_dir
        self._make_group, self._allocate = make_group, allocate
        self._processes: list[RankProcess] = []
        self._fds: list[int] = []
        self._groups = 0

    def socket_group(self, size: int) -> Ranks:
        ranks = Ranks(self._running(size))
        self._groups += 1
        streams: list[list[socket.socket | None]] = [[None] * size for _ in range(size)]
        for rank, other in itertools.combinations(range(size), 2):
            streams[rank][other], streams[other][rank] = connected()
        for rank, process in enumerate(ranks.processes):
            process.join_by_sockets(streams[rank], f"sockets-{self._groups}", rank, self._cache_dir)
        for process in ranks.processes:
            process.result()
        for stream in itertools.chain(*streams):
            if stream is not None:
                stream.close()
        return ranks

    def _running(self, size: int) -> list[RankProcess]:
        self._processes = [process for process in self._processes if process.process.poll() is None]
        while len(self._processes) < size:
            self._processes.append(RankProcess())
        return self._processes[:size]

    def group(self, size: int, slot_bytes: int = 1 << 16) -> Ranks:
        processes = self._running(size)
        fd = self._allocate(size, slot_bytes)
        self._fds.append(fd)
        ranks = Ranks(processes, fd)
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
