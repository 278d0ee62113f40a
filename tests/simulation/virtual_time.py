"""An event loop in which time passes only where nobody has anything to do, and nothing runs beside it."""

from __future__ import annotations

import asyncio
import selectors
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

START_S = 1000.0


class StuckError(AssertionError):
    """Somebody waits for what nobody will ever do."""


class _NoSockets(selectors.SelectSelector):
    """Nothing ever arrives but what the loop's own timers bring."""

    def __init__(self) -> None:
        super().__init__()
        self.now = START_S

    def select(self, timeout: float | None = None) -> list[tuple[selectors.SelectorKey, int]]:
        if timeout is None:
            raise StuckError("nobody has anything to do, and somebody waits")
        self.now += max(timeout, 0.0)
        return []


class VirtualLoop(asyncio.SelectorEventLoop):
    def __init__(self) -> None:
        self._clock = _NoSockets()
        super().__init__(self._clock)

    def time(self) -> float:
        return self._clock.now

    def jump(self, seconds: float) -> None:
        """All of this machine stood still, and its clock went on."""
        self._clock.now += seconds

    def run_in_executor(self, executor: Any, func: Callable[..., Any], *args: Any) -> asyncio.Future[Any]:
        """Not in a thread: when the loop turns next."""
        future = self.create_future()

        def run() -> None:
            if future.cancelled():
                return
            try:
                future.set_result(func(*args))
            except BaseException as error:
                future.set_exception(error)

        self.call_soon(run)
        return future

    @contextmanager
    def everywhere(self) -> Iterator[None]:
        """What the engine reads of clocks is this loop's time; whoever sleeps in its thread stops all."""
        kept = time.monotonic, time.perf_counter, time.sleep
        time.monotonic = time.perf_counter = self.time  # type: ignore[assignment]
        time.sleep = self.jump
        try:
            yield
        finally:
            time.monotonic, time.perf_counter, time.sleep = kept
