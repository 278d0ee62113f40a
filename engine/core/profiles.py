"""Profiles of a serving core's steps: whoever asks for one is told when it runs, and when it has been written."""

from __future__ import annotations

import logging
from collections.abc import Callable

from engine.core.wire import StartProfile, StopProfile
from engine.executor.interface import Executor, MakesProfiles

logger = logging.getLogger(__name__)


class CoreProfiles:
    """For the loop's thread."""

    def __init__(self, executor: Executor, changed: Callable[[], None]) -> None:
        """`changed`: called from any thread when an order has been carried out."""
        self._executor = executor if isinstance(executor, MakesProfiles) else None
        self._changed = changed
        self.taken = 0
        """orders that have been carried out"""

    @property
    def running(self) -> bool:
        return self._executor is not None and self._executor.is_profiling

    def take(self, order: StartProfile | StopProfile, core_seconds: Callable[[], dict[str, float]]) -> None:
        """What fails is told to the log: the engine serves on. `core_seconds`: of each part of the loop's time."""
        if self._executor is None:
            logger.error("this executor makes no profiles")
            self._done()
            return
        try:
            if isinstance(order, StopProfile):
                self._executor.end_profile(self._done)
            else:
                self._executor.start_profile(order.path, order.steps, core_seconds, self._done)
        except Exception:
            logger.exception("no profile: torch's profiler failed")
            self._done()

    def _done(self) -> None:
        self.taken += 1
        self._changed()
