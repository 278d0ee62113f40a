"""Agents as processes of this machine, which is as many hosts as a test wants; and a network that is slow, or cut."""

from __future__ import annotations

import socket
import subprocess
import threading
import time
from collections.abc import Sequence
from contextlib import suppress

import msgspec
from fake_ranks import FAKE_GROUP

from engine.child import python_command
from engine.config import EngineConfig
from engine.errors import EngineError
from engine.executor.agent import AgentTask
from engine.executor.connections import Address
from engine.executor.multiproc import MultiprocExecutor
from engine.executor.ranks import Parts
from engine.executor.remote_ranks import Places, RemoteRanks


class AgentProcesses:
    """See `remote_ranks.Places`."""

    def __init__(
        self,
        here: bool = False,
        behind: Sequence[str] = (),
        host: str = "127.0.0.1",
        slow_s: float = 0,
        nodes: Sequence[str] = (),
    ) -> None:
        """`here`: all are on the driver's node; else on those of `nodes` by rank, or each on its own.

        `behind`: the command line that runs an agent's as its last arguments; `slow_s`: what the driver sends to
        ranks, and they to it, takes so long."""
        self.processes: dict[int, subprocess.Popen[bytes]] = {}
        self.proxy: SlowProxy | None = None
        self.secret = b""
        self.driver: Address = "", 0
        self._here, self._behind, self._host, self._slow_s = here, behind, host, slow_s
        self._nodes = nodes

    def host(self) -> str:
        return self._host

    def place(self, ranks: Sequence[int], driver: Address, secret: bytes, timeout_s: float) -> None:
        self.secret, self.driver = secret, driver
        if self._slow_s:
            self.proxy = SlowProxy(driver, self._slow_s)
            driver = self.proxy.address
        for rank in ranks:
            command = [*self._behind, *python_command("engine.executor.agent")]
            self.processes[rank] = process = subprocess.Popen(command, stdin=subprocess.PIPE)
            assert process.stdin is not None
            task = AgentTask(rank, driver, secret.hex(), timeout_s, self._node(rank))
            with suppress(BrokenPipeError):  # it may have left
                process.stdin.write(msgspec.json.encode(task) + b"\n")
                process.stdin.close()

    def pid(self, rank: int) -> int:
        return self.processes[rank].pid

    def check(self) -> None:
        for rank, process in self.processes.items():
            if process.poll() is not None:
                raise EngineError(f"rank {rank}: its agent left with status {process.returncode}")

    def node(self) -> str:
        return self._node(0)

    def _node(self, rank: int) -> str:
        return self._nodes[rank] if self._nodes else "here" if self._here else str(rank)

    def cause_of(self, rank: int) -> str | None:
        return None

    def close(self) -> None:
        for process in self.processes.values():
            process.kill()
            process.wait()
        if self.proxy is not None:
            self.proxy.close()


class SlowProxy:
    """Passes everything on, later."""

    def __init__(self, to: Address, delay_s: float) -> None:
        self._to, self._delay_s = to, delay_s
        self._server = socket.create_server(("127.0.0.1", 0))
        self.address: Address = self._server.getsockname()
        self._streams: list[socket.socket] = []
        threading.Thread(target=self._accept, daemon=True).start()

    def close(self) -> None:
        for stream in (self._server, *self._streams):
            with suppress(OSError):
                stream.shutdown(socket.SHUT_RDWR)
            stream.close()

    def _accept(self) -> None:
        with suppress(OSError):
            while True:
                near, _ = self._server.accept()
                far = socket.create_connection(self._to)
                self._streams += [near, far]
                for pair in ((near, far), (far, near)):
                    threading.Thread(target=self._pass_on, args=pair, daemon=True).start()

    def _pass_on(self, source: socket.socket, to: socket.socket) -> None:
        with suppress(OSError):
            while data := source.recv(1 << 16):
                time.sleep(self._delay_s)
                to.sendall(data)
        with suppress(OSError):
            to.shutdown(socket.SHUT_WR)


def remote_executor(config: EngineConfig, executor: str, places: Places, *group: str) -> MultiprocExecutor:
    """`group`: what the shared memory's parts are, where they are not the engine's own."""

    def make_ranks(config: EngineConfig, parts: Parts) -> RemoteRanks:
        return RemoteRanks(config, parts, places)

    return MultiprocExecutor(config, Parts(executor, *group), make_ranks)


def drive(config: str) -> None:
    """In a process of its own: a driver that waits for ever."""
    places = AgentProcesses(here=True)
    made = remote_executor(msgspec.json.decode(config, type=EngineConfig), "fake_ranks:Light", places, *FAKE_GROUP)
    made.load()
    print("loaded", flush=True)
    time.sleep(3600)
