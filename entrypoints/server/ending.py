"""The orderly end of a server. uvicorn waits for running requests without a limit, or cancels what runs, which leaves
tracebacks and broken connections. Here a signal ends the server when running requests have ended, or after
`--shutdown-timeout`: then their clients get an error. For `--drain-delay` before that it takes new requests as ever,
and says that it will not: who looks at `/ready` sends no more. A second signal waits for nothing."""

from __future__ import annotations

import asyncio
import logging
import signal
import socket
import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from types import FrameType

import uvicorn

logger = logging.getLogger("pageloom.server")

_TICK_S = 1.0
"""for the date in the headers; what is urgent wakes the server"""
_DRAIN_POLL_S = 0.05
LAST_ERRORS_S = 0.25
"""for streams to end with an error, before what waits elsewhere is cancelled"""
_LAST_ANSWERS_S = 10.0
"""and for clients that are slow to take the end of their answers"""
_NEVER_S = 5.0
"""later uvicorn would end what should have ended by then"""


class EndingServer(ABC, uvicorn.Server):
    """What runs is `num_running`, until `end_running` gives it an error."""

    def __init__(self, config: uvicorn.Config, grace_s: float, notice_s: float = 0.0) -> None:
        """`grace_s`: for running requests, when no more are taken, which is `notice_s` after the signal."""
        config.timeout_graceful_shutdown = int(grace_s + _LAST_ANSWERS_S + _NEVER_S)
        super().__init__(config)
        self._grace_s, self._notice_s = grace_s, notice_s
        self._ending = False
        self._hurried = False
        """a second signal came: nothing is waited for"""
        self._woken = asyncio.Event()
        self._wake: Callable[[], object] = lambda: None

    @property
    @abstractmethod
    def num_running(self) -> int: ...

    @abstractmethod
    async def end_running(self) -> None: ...

    async def main_loop(self) -> None:
        """uvicorn's wakes ten times a second; an idle server should hardly wake at all."""
        loop = asyncio.get_running_loop()
        self._wake = lambda: loop.call_soon_threadsafe(self._woken.set)
        while not await self.on_tick(0):
            await self._tick(_TICK_S)
        if not self.can_answer or not self._notice_s:
            return
        logger.info("shutting down in %g s, until which requests are taken (again to end now)", self._notice_s)
        ends_at = time.monotonic() + self._notice_s
        while self.can_answer and not self._hurried and (left_s := ends_at - time.monotonic()) > 0:
            await self._tick(min(left_s, _TICK_S))
            await self.on_tick(0)

    async def _tick(self, most_s: float) -> None:
        with suppress(TimeoutError):
            await asyncio.wait_for(self._woken.wait(), most_s)
        self._woken.clear()

    @property
    def can_answer(self) -> bool:
        """Whether there is a point in taking requests."""
        return True

    def announce_end(self) -> None:
        """Of a signal's handler: whoever asks is told from now on."""

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        """Not uvicorn's `force_exit`, which leaves whatever runs to be cancelled."""
        self._hurried = self.should_exit
        self._captured_signals.append(sig)
        self.should_exit = True
        self.announce_end()
        self._wake()

    @property
    def signalled(self) -> bool:
        return bool(self._captured_signals)

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        running = self.num_running
        wait = f"; up to {self._grace_s:g} s for {running} running requests (again to end them now)" if running else ""
        logger.info("shutting down%s", wait)
        end = asyncio.create_task(self._end_requests())
        try:
            await super().shutdown(sockets)
        finally:
            if not self._ending:
                end.cancel()
            await asyncio.gather(end, return_exceptions=True)

    async def _end_requests(self) -> None:
        """Once none runs, or in the end all the same."""
        await self._wait(self._grace_s, lambda: self.num_running > 0)
        self._ending = True
        await self.end_running()
        await self._wait(_LAST_ANSWERS_S, lambda: bool(self.server_state.connections))
        for connection in list(self.server_state.connections):
            if connection.transport is not None:
                connection.transport.abort()

    async def _wait(self, most_s: float, lasts: Callable[[], bool]) -> None:
        deadline = time.monotonic() + most_s
        while lasts() and time.monotonic() < deadline and not self._hurried:
            await asyncio.sleep(_DRAIN_POLL_S)


@contextmanager
def signals_are_uvicorns() -> Iterator[None]:
    """uvicorn raises the signals that ended it once more when it has ended: by then they are served."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = {number: signal.signal(number, lambda *_: None) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def url_of(listener: socket.socket, scheme: str = "http") -> str:
    if listener.family == socket.AF_UNIX:
        return f"unix:{listener.getsockname()}"
    host, port = listener.getsockname()[:2]
    return f"{scheme}://[{host}]:{port}" if ":" in host else f"{scheme}://{host}:{port}"
