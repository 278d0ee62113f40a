"""Who has waited for too long, and has not begun."""

from __future__ import annotations

import time
from collections.abc import Sequence

from engine.core.step_scheduler import StepScheduler
from engine.core.wire import AddRequest, Delta

_FEWEST = 1024


class Overdue:
    def __init__(self, scheduler: StepScheduler) -> None:
        self._scheduler = scheduler
        self._until: dict[str, float] = {}
        """by request, in order of arrival"""
        self._most = _FEWEST

    def add(self, request: AddRequest) -> None:
        if request.wait_s is not None:
            self._until[request.request_id] = time.monotonic() + request.wait_s

    def end(self) -> Sequence[Delta]:
        """Looks at the earliest arrival that has not begun; those behind it have waited for less."""
        deltas: list[Delta] = []
        while self._until:
            request_id = next(iter(self._until))
            begun = self._scheduler.has_begun(request_id)
            if not begun and self._until[request_id] > time.monotonic():
                break
            del self._until[request_id]
            if not begun:
                deltas += self._scheduler.give_up(request_id)
        if len(self._until) > self._most:  # one of low priority holds up those behind it that have begun
            self._until = {i: at for i, at in self._until.items() if not self._scheduler.has_begun(i)}
            self._most = 2 * len(self._until) + _FEWEST
        return deltas
