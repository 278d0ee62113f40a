"""What went wrong with one request ends that request and nothing else.

Planning and completing touch one sequence after the other. Whatever raises there is noted here and the others go on;
the request ends when the plan at hand is complete, exactly as if it were aborted then (`Scheduler.end_failed`), so
nothing that the plan says of its row or blocks is taken back.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager

from engine.errors import InvalidRequestError, in_words
from engine.scheduling.sequence import Sequence

logger = logging.getLogger(__name__)


class Failures:
    def __init__(self) -> None:
        self._noted: dict[Sequence, tuple[str, str]] = {}

    @contextmanager
    def isolate(self, seq: Sequence) -> Iterator[None]:
        """An exception inside is the failure of this sequence's request."""
        try:
            yield
        except Exception as error:
            self.note(seq, error)

    def note(self, seq: Sequence, error: Exception) -> None:
        is_its_own = isinstance(error, InvalidRequestError)
        logger.error("request %r failed in the scheduler: %s", seq.request_id, error, exc_info=not is_its_own and error)
        self._noted.setdefault(seq, (str(error), "invalid") if is_its_own else (in_words(error), "fault"))

    def take(self) -> list[tuple[Sequence, str, str]]:
        """All since the last call, why, and the kind of the failure."""
        noted, self._noted = self._noted, {}
        return [(seq, reason, kind) for seq, (reason, kind) in noted.items()]
