"""Turns at what only a few may do at a time."""

from __future__ import annotations

import asyncio
import heapq
import itertools
from types import TracebackType

from engine.errors import QueueFullError

PATIENCE = 100.0
"""who wants little may go before who came earlier by so many times what the other wants more"""


class Turns:
    """Up to `size` at a time, for one event loop. Among those that wait, the order is that of arrival plus `PATIENCE`
    times the work that each brings: short ones do not wait for one body's hundred long ones, and these not for ever.
    """

    def __init__(self, size: int, longest_wait_s: float, message: str) -> None:
        """Who has waited for `longest_wait_s` is refused with the `message`."""
        self.size = size
        self.free = size
        self._longest_wait_s = longest_wait_s
        self._message = message
        self._waiting: list[tuple[float, int, asyncio.Future[None]]] = []
        self._serial = itertools.count()

    def of(self, work_s: float = 0.0) -> Turn:
        """`async with turns.of(seconds)`: raises `QueueFullError`. `work_s`: what it is expected to take."""
        return Turn(self, work_s)

    @property
    def waiting(self) -> int:
        return sum(not turn.done() for _, _, turn in self._waiting)

    async def take(self, work_s: float) -> None:
        if self.free:
            self.free -= 1
            return
        loop = asyncio.get_running_loop()
        turn = loop.create_future()
        heapq.heappush(self._waiting, (loop.time() + PATIENCE * work_s, next(self._serial), turn))
        timer = loop.call_later(self._longest_wait_s, _refuse, turn, self._message)
        try:
            await turn
        except asyncio.CancelledError:
            if turn.done() and not turn.cancelled() and turn.exception() is None:
                self.give()  # it came, and nobody is there to take it
            turn.cancel()
            raise
        finally:
            timer.cancel()

    def give(self) -> None:
        """To whoever is next."""
        while self._waiting:
            _, _, turn = heapq.heappop(self._waiting)
            if not turn.done():
                turn.set_result(None)
                return
        self.free += 1


class Turn:
    __slots__ = ("_turns", "_work_s")

    def __init__(self, turns: Turns, work_s: float) -> None:
        self._turns, self._work_s = turns, work_s

    async def __aenter__(self) -> None:
        await self._turns.take(self._work_s)

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._turns.give()


def _refuse(turn: asyncio.Future[None], message: str) -> None:
    if not turn.done():
        turn.set_exception(QueueFullError(message))
