"""Profiles of a serving core's steps: whoever asks for one is told when it runs, and when it has been written."""

from __future__ import annotations

import logging
from collections.abc import Callable

from engine.core.wire import StartProfile, StopProfile
from engine.executor.interface import Executor, Profiles

logger = logging.getLogger(__name__)


class CoreProfiles:
    """For the loop's thread."""

    def __init__(self, executor: Executor, core_seconds: Callable[[], dict[str, float]]) -> None:
        """`core_seconds`: of each part of that thread's time."""
        self._executor = executor if isinstance(executor, Profiles) else None
        self._core_seconds = core_seconds
        self.taken = 0
        """orders"""

    @property
    def running(self) -> bool:
        return self._executor is not None and self._executor.is_profiling

    def take(self, order: StartProfile | StopProfile) -> None:
        """What fails is told to the log: the engine serves on."""
        self.taken += 1
        if self._executor is None:
            logger.error("this executor makes no profiles")
            return
        try:
            if isinstance(order, StopProfile):
                self._executor.end_profile()
            elif not self.running:
                self._executor.start_profile(order.path, order.steps, self._core_seconds)
        except Exception:
            logger.exception("no profile: torch's profiler failed")
