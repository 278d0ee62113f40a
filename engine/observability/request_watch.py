"""One request, watched from its call to its end, for logs and traces. Nothing of it happens with each token."""

from __future__ import annotations

import time
from collections.abc import Callable
from types import TracebackType

from engine.observability.timings import RequestTimings


class RequestWatch:
    """Around what `AsyncEngine.generate` does for one request. `tell` is called once, with what it ended by."""

    def __init__(self, tell: Callable[[RequestWatch, BaseException | None], None]) -> None:
        self._tell = tell
        self.began_ns = self.ended_ns = 0
        """Unix time"""
        self.timings: RequestTimings | None = None
        """None: it was refused before the core had it"""
        self.prompt: str | None = None
        """None: it was given as token ids alone"""
        self.answers: list[str] = []
        """of each sample, as far as text was made of it"""

    def __enter__(self) -> RequestWatch:
        self.began_ns = time.time_ns()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.ended_ns = time.time_ns()
        self._tell(self, error)
