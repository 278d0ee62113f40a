"""Several processes take requests, on the same port, before one fleet of cores (`--api-server-count`).

This one has the cores and their hub (`engine.front_ends`), and no door of its own. It starts the others, passes signals
on to them, starts another one behind each that dies, and ends when they have ended.
"""

from __future__ import annotations

import argparse
import asyncio
import logging
import os
import signal
import socket
import subprocess
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path

import msgspec
from msgspec.structs import replace

from engine.child import ChildOutput, exit_cause, python_command
from engine.core.client import CoreClient
from engine.core.supervision import SocketDirectory
from engine.core.wire import CoreReady
from engine.errors import EngineError
from engine.front_ends.hub import Hub
from engine.front_ends.wire import FrontEndStart
from engine.launched import leave_unless_first
from engine.observability.logs import child_mark
from engine.plan import resolve_with_plan
from engine.replicas.choice import process_client
from engine.replicas.restarts import Restarts
from entrypoints.options import engine_args
from entrypoints.server.api_key import VARIABLE
from entrypoints.server.before_start import check_options
from entrypoints.server.counts import SharedMemory
from entrypoints.server.ending import url_of
from entrypoints.server.front_end import NAME, Begin
from entrypoints.server.responses_api.store import ResponseStore
from entrypoints.server.run import listen, listening, pass_over_hangups
from entrypoints.server.supervisor import Supervisor

logger = logging.getLogger("pageloom.server")

_MOST_DEATHS = 10
"""of front ends, in ten minutes"""
_TICK_S = 1.0
_OF_SUPERVISORS = ("NOTIFY_SOCKET", "WATCHDOG_USEC", "WATCHDOG_PID")


@contextmanager
def listeners(host: str, port: int, path: Path | None, count: int) -> Iterator[list[socket.socket]]:
    """One for each process; of a Unix socket the same for all. Raises `ConfigError`, also where another server of this
    user would share the port."""
    with listening(host, port, path) as first:
        if path is not None:
            yield [first] * count
            return
        port = first.getsockname()[1]
    sockets: list[socket.socket] = []
    try:
        while len(sockets) < count:
            sockets.append(listen(host, port, shared=True))
        yield sockets
    finally:
        for each in sockets:
            each.close()


class _Process:
    """A front end that runs."""

    def __init__(self, begin: Begin) -> None:
        mark = begin.log_mark
        # A session of its own: Ctrl-C reaches this process only, which passes it on.
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
        self._output = ChildOutput(self._process.stdout, "front-end-stderr", mark)
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
        status = await asyncio.to_thread(self._process.wait)
        await asyncio.to_thread(self._output.close)
        os.close(self._sentinel)
        return status, exit_cause(status, self._output.tail)

    def send(self, number: int) -> None:
        """SIGKILL goes to all that it has started, too."""
        with suppress(ProcessLookupError):
            if self._process.returncode is not None:
                return  # its number may belong to others
            if number == signal.SIGKILL:
                os.killpg(self._process.pid, number)
            else:
                signal.pidfd_send_signal(self._sentinel, number)


class _FrontEnds:
    """All of them, from the first start to the last end. Belongs to the event loop."""

    def __init__(self, hub: Hub, directory: SocketDirectory, sockets: list[socket.socket], begin: Begin) -> None:
        """`begin`: what all are told; the rest is filled in."""
        self._hub, self._directory, self._sockets, self._begin = hub, directory, sockets, begin
        self.count, self.served_name = len(sockets), hub.config.model.served_name
        self._processes: dict[int, _Process] = {}
        """by their numbers"""
        self._numbers = 0
        self._restarts = Restarts(_MOST_DEATHS)
        self.all_serve = asyncio.Event()
        self.is_ending = False
        self.failed: str | None = None
        self.statuses: list[int] = []
        hub.on_serves, hub.on_stuck = self._serves, self._kill

    async def run(self) -> None:
        """Until all have ended, and none is to follow."""
        await asyncio.gather(*(self._keep(place) for place in range(self.count)))

    def send(self, number: int) -> None:
        for process in list(self._processes.values()):
            process.send(number)

    def end(self, number: int) -> None:
        """None follows any more. They are sent the signal."""
        self.is_ending = True
        for each in self._sockets:
            each.close()  # theirs are still open, as long as they want
        self.send(number)

    async def _keep(self, place: int) -> None:
        wait_s: float | None = 0.0
        while wait_s is not None and not self.is_ending:
            self._numbers += 1
            number = self._numbers
            process = self._processes[number] = _Process(self._begin_of(number, place))
            status, cause = await process.ended()
            del self._processes[number]
            self._hub.lost(number)
            if self.is_ending:
                self.statuses.append(status)
                return
            served = process.serves
            wait_s = self._restarts.died(time.monotonic(), served) if self.all_serve.is_set() else None
            if wait_s is None:
                self.failed = f"{NAME.format(number)} ended, and none follows: {cause}"
                self.end(signal.SIGTERM)
            else:
                logger.error("%s ended, and another one follows: %s", NAME.format(number), cause)
                await asyncio.sleep(wait_s)

    def _begin_of(self, number: int, place: int) -> Begin:
        start = FrontEndStart(
            number=number,
            config=self._hub.config,
            parent_pid=os.getpid(),
            to_hub=self._directory.to_core,
            from_hub=self._hub.address(number),
        )
        return replace(self._begin, start=start, listener_fd=self._sockets[place].fileno(), place=place)

    def _serves(self, number: int) -> None:
        self._processes[number].serves = True
        if sum(each.serves for each in self._processes.values()) == len(self._sockets):
            self.all_serve.set()

    def _kill(self, number: int) -> None:
        if number in self._processes:
            self._processes[number].send(signal.SIGKILL)


async def serve_front_ends(options: argparse.Namespace, given: Sequence[str]) -> int:
    """As `serve_engine`. `given`: of the command line."""
    api_key = os.environ.get(VARIABLE)
    check_options(options)
    supervisor = Supervisor(os.environ, os.getpid())
    passes_hangups = pass_over_hangups(options, supervisor)
    args = engine_args(options, options.model)
    with listeners(options.host, options.port, options.uds, options.api_server_count) as sockets:
        await asyncio.to_thread(leave_unless_first, args)
        _, config = await asyncio.to_thread(resolve_with_plan, args)
        directory, client, quotas = SocketDirectory(), process_client(config), SharedMemory.create()
        hub, limits = Hub(config, client, directory), config.limits
        store = options.response_store or Path(directory.path) / "responses"
        try:
            bounds = limits.stored_responses_bytes, limits.stored_responses_s
            ResponseStore(store, *bounds, shared=True).close()  # what is wrong with it is said once
            begin = Begin(
                start=FrontEndStart(number=0, config=config, parent_pid=0, to_hub="", from_hub=""),
                given=list(given),
                listener_fd=0,
                quotas_fd=quotas,
                place=0,
                api_key=api_key,
                response_store=str(store),
                log_level=logging.getLogger().getEffectiveLevel(),
                log_mark=child_mark(),
            )
            front_ends = _FrontEnds(hub, directory, sockets, begin)
            server = _Server(front_ends, hub, client, supervisor, passes_hangups)
            return await server.run(url_of(sockets[0], "http" if options.ssl_certfile is None else "https"))
        finally:
            await asyncio.to_thread(client.close)
            hub.close()
            directory.remove()
            os.close(quotas)


class _Server:
    def __init__(
        self, front_ends: _FrontEnds, hub: Hub, client: CoreClient, supervisor: Supervisor, passes_hangups: bool
    ) -> None:
        self._front_ends, self._hub, self._client = front_ends, hub, client
        self._supervisor, self._passes_hangups = supervisor, passes_hangups
        self._signals: list[int] = []
        self._death: EngineError | None = None
        self._ready: CoreReady | None = None

    async def run(self, url: str) -> int:
        """Returns the exit status."""
        loop = asyncio.get_running_loop()
        for number in (signal.SIGINT, signal.SIGTERM):
            loop.add_signal_handler(number, self._end, number)
        if self._passes_hangups:
            loop.add_signal_handler(signal.SIGHUP, self._front_ends.send, signal.SIGHUP)
        running, hub = asyncio.create_task(self._front_ends.run()), asyncio.create_task(self._start())
        telling = asyncio.create_task(self._tell(url))
        try:
            while not running.done():
                await asyncio.wait({running}, timeout=_TICK_S)
                if self._supervisor.watches and self._client.stalled() is None:
                    self._supervisor.alive()
        finally:
            for task in (telling, hub):
                task.cancel()
            await asyncio.gather(telling, hub, return_exceptions=True)
        running.result()
        return self._status()

    def _status(self) -> int:
        if self._signals and self._ready is None:
            return 128 + self._signals[0]
        if self._death is not None:
            raise self._death
        if self._front_ends.failed is not None:
            raise EngineError(self._front_ends.failed)
        return int(any(self._front_ends.statuses))

    def _end(self, number: int) -> None:
        self._signals.append(number)
        self._supervisor.stopping()
        if self._ready is None:
            logger.info("ended by %s while starting", signal.Signals(number).name)
            self._client.abandon()
        self._front_ends.end(number)

    async def _start(self) -> None:
        """Start the cores and pass on what front ends and they say to each other, until no core serves."""
        try:
            self._ready = await asyncio.to_thread(self._client.start)
            self._death = await self._hub.run(self._ready)
        except EngineError as error:
            self._death = error
            self._front_ends.end(signal.SIGTERM)
        # Where cores die, front ends learn it from the hub, tell their clients, and end by themselves.
        self._front_ends.is_ending = True

    async def _tell(self, url: str) -> None:
        await self._front_ends.all_serve.wait()
        name = self._front_ends.served_name
        logger.info("ready: %s serves %s through %d API servers", url, name, self._front_ends.count)
        self._supervisor.ready(f"serves {name}")
