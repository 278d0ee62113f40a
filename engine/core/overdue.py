"""Who has waited for too long, and has not begun."""

from __future__ import annotations

import time
from collections.abc import Sequence
from heapq import heapify, heappop, heappush

from engine.core.step_scheduler import StepScheduler
from engine.core.wire import AddRequest, Delta

_FEWEST = 1024


class Overdue:
    def __init__(self, scheduler: StepScheduler) -> None:
        self._scheduler = scheduler
        self._until: list[tuple[float, str]] = []
        """until when each request may wait, a heap"""
        self._most = _FEWEST

    def add(self, request: AddRequest) -> None:
        if request.wait_s is not None:
            heappush(self._until, (time.monotonic() + request.wait_s, request.request_id))

    def end(self) -> Sequence[Delta]:
        """Looks at the one that may wait for the shortest time, of those that have not begun."""
        deltas: list[Delta] = []
        while self._until:
            until, request_id = self._until[0]
            begun = self._scheduler.has_begun(request_id)
            if not begun and until > time.monotonic():
                break
            heappop(self._until)
            if not begun:
                deltas += self._scheduler.give_up(request_id)
        if len(self._until) > self._most:  # one of low priority holds up those behind it that have begun
            self._until = [each for each in self._until if not self._scheduler.has_begun(each[1])]
            heapify(self._until)
            self._most = 2 * len(self._until) + _FEWEST
        return deltas
