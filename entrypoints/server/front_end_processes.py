"""Processes that take requests, from their first start to their last end: one for each place, and another one behind
each that dies."""

from __future__ import annotations

import asyncio
import logging
import os
import signal
import socket
import subprocess
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path

import msgspec
from msgspec.structs import replace

from engine.child import ChildOutput, exit_cause, python_command
from engine.core.supervision import SocketDirectory
from engine.errors import ConfigError
from engine.front_ends.hub import Hub
from engine.front_ends.wire import FrontEndStart
from engine.replicas.restarts import Restarts
from entrypoints.server.front_end import NAME, Begin
from entrypoints.server.run import listen, listening

logger = logging.getLogger("pageloom.server")

_MOST_DEATHS = 10
"""in ten minutes, that are followed soon"""
_LATER_S = 30.0
"""behind more of them, as long as others serve"""
_OF_SUPERVISORS = ("NOTIFY_SOCKET", "WATCHDOG_USEC", "WATCHDOG_PID")


@contextmanager
def listeners(host: str, port: int, path: Path | None, count: int) -> Iterator[list[socket.socket]]:
    """One for each process; of a Unix socket the same for all. Raises `ConfigError`, also where another server of this
    user would share the port."""
    with ExitStack() as stack:
        with listening(host, port, path) as first:
            if path is not None:
                yield [first] * count
                return
            port = first.getsockname()[1]
            stack.enter_context(_alone_at(port))
        sockets: list[socket.socket] = []
        while len(sockets) < count:
            sockets.append(stack.enter_context(listen(host, port, shared=True)))
        yield sockets


@contextmanager
def _alone_at(port: int) -> Iterator[None]:
    """Sockets that share a port share it with any others of this user, also before they listen: until then nobody sees
    that it is taken. The kernel drops the name with its holder."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as name:
        try:
            name.bind(f"\0pageloom-port-{port}")
        except OSError:
            raise ConfigError(
                f"cannot listen on port {port}: another server with --api-server-count has it; choose another --port"
            ) from None
        yield


class _Process:
    """A front end that runs."""

    def __init__(self, begin: Begin) -> None:
        # A session of its own: Ctrl-C reaches the parent only, which tells it.
        self._process = subprocess.Popen(
            python_command("entrypoints.server.front_end"),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            start_new_session=True,
            pass_fds=(begin.listener_fd, begin.quotas_fd),
            env={name: value for name, value in os.environ.items() if name not in _OF_SUPERVISORS},
        )
        self._sentinel = os.pidfd_open(self._process.pid)
        self.serves = False
        assert self._process.stdin is not None and self._process.stdout is not None
        self._output = ChildOutput(self._process.stdout, "front-end-stderr", begin.log_mark)
        with suppress(BrokenPipeError):
            self._process.stdin.write(msgspec.json.encode(begin) + b"\n")
            self._process.stdin.close()

    async def ended(self) -> tuple[int, str]:
        """Wait for its end: (status, cause)."""
        loop, end = asyncio.get_running_loop(), asyncio.Event()
        loop.add_reader(self._sentinel, end.set)
        try:
            await end.wait()
        finally:
            loop.remove_reader(self._sentinel)
            self.send(signal.SIGKILL)  # what it has started
        status = self._process.wait()  # at once
        os.close(self._sentinel)
        self._output.close(0.1)
        return status, exit_cause(status, self._output.tail, "start fewer API servers, --api-server-count")

    def send(self, number: int) -> None:
        """SIGKILL goes to all that it has started, too."""
        with suppress(ProcessLookupError):
            if self._process.returncode is not None:
                return  # its number may belong to others
            if number == signal.SIGKILL:
                os.killpg(self._process.pid, number)
            else:
                signal.pidfd_send_signal(self._sentinel, number)


class FrontEnds:
    """Belongs to the event loop."""

    def __init__(
        self,
        hub: Hub,
        directory: SocketDirectory,
        sockets: list[socket.socket],
        begin: Begin,
        forget: Callable[[int], None],
    ) -> None:
        """`begin`: what all are told; the rest is filled in. `forget`: what the one at a place has counted that has
        gone."""
        self._hub, self._directory, self._sockets, self._begin = hub, directory, sockets, begin
        self._forget = forget
        self.count, self.served_name = len(sockets), hub.config.model.served_name
        self._processes: dict[int, _Process] = {}
        """by their numbers"""
        self._numbers = 0
        self._restarts = Restarts(_MOST_DEATHS)
        self.all_serve = asyncio.Event()
        self._ending = asyncio.Event()
        self.failed: str | None = None
        self.went_wrong = False
        """one that had served ended with an error when it was to end"""
        hub.on_serves, hub.on_stuck = self._serves, self._kill

    async def run(self) -> None:
        """Until all have ended, and none is to follow."""
        await asyncio.gather(*(self._keep(place) for place in range(self.count)))

    def look_again(self) -> None:
        """At their files. Those that start read them anyway."""
        for process in list(self._processes.values()):
            if process.serves:
                process.send(signal.SIGHUP)

    def end(self) -> None:
        """None follows any more, and those that run are told; told again they wait for nothing."""
        self._end_following()
        for process in list(self._processes.values()):
            process.send(signal.SIGTERM)

    def cores_are_gone(self) -> None:
        """Those that serve learn it from the hub, tell their clients, and end by themselves."""
        self._end_following()
        for process in list(self._processes.values()):
            if not process.serves:
                process.send(signal.SIGTERM)

    def _end_following(self) -> None:
        self._ending.set()
        for each in self._sockets:
            each.close()  # theirs are still open, as long as they want

    async def _keep(self, place: int) -> None:
        while not self._ending.is_set():
            self._numbers += 1
            number = self._numbers
            process = self._processes[number] = _Process(self._begin_of(number, place))
            status, cause = await process.ended()
            del self._processes[number]
            self._hub.lost(number)
            self._forget(place)
            if self._ending.is_set():
                self.went_wrong |= process.serves and status != 0
            elif (wait_s := self._wait_s(process.serves)) is None:
                when = "" if process.serves else " while it started"
                self.failed = f"{NAME.format(number)}, a front-end process, died{when}, and none follows: {cause}"
                self.end()
            else:
                logger.error("%s ended, and another one follows: %s", NAME.format(number), cause)
                with suppress(TimeoutError):
                    await asyncio.wait_for(self._ending.wait(), wait_s)

    def _wait_s(self, served: bool) -> float | None:
        """Until another one follows; None: none does. What is wrong may be put right while others serve."""
        if not self.all_serve.is_set():
            return None
        wait_s = self._restarts.died(time.monotonic(), served)
        others = any(each.serves for each in self._processes.values())
        return _LATER_S if wait_s is None and others else wait_s

    def _begin_of(self, number: int, place: int) -> Begin:
        start = FrontEndStart(
            number=number,
            config=self._hub.config,
            parent_pid=os.getpid(),
            to_hub=self._directory.to_core,
            from_hub=self._hub.address(number),
            directory=self._directory.path,
        )
        return replace(self._begin, start=start, listener_fd=self._sockets[place].fileno(), place=place)

    def _serves(self, number: int) -> None:
        if (process := self._processes.get(number)) is None:
            return
        process.serves = True
        if sum(each.serves for each in self._processes.values()) == self.count:
            self.all_serve.set()

    def _kill(self, number: int) -> None:
        if (process := self._processes.get(number)) is not None:
            process.send(signal.SIGKILL)
