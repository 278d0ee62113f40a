"""A clock that jumps from event to event."""

from __future__ import annotations

import heapq
import itertools
from collections.abc import Callable


class Clock:
    def __init__(self) -> None:
        self.now = 0.0
        """seconds"""
        self._events: list[tuple[float, int, Callable[[], None]]] = []
        self._order = itertools.count()

    def at(self, when_s: float, what: Callable[[], None]) -> None:
        """What is at the same time happens in the order in which it was said."""
        heapq.heappush(self._events, (when_s, next(self._order), what))

    def run(self, after_each: Callable[[], None]) -> None:
        """Until there is nothing more to happen."""
        while self._events:
            self.now, _, what = heapq.heappop(self._events)
            what()
            after_each()
