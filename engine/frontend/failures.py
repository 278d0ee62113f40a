"""What one request raises is its own end, and nobody else's.

Libraries in Rust raise `PanicException` for their own defects: a `BaseException`, which every `except Exception` lets
pass. Here it counts as any other failure of the request at hand; only what is meant for the interpreter or for the
task does not.
"""

from __future__ import annotations

import asyncio
import logging
from types import TracebackType

from engine.errors import EngineError, RequestFailedError

logger = logging.getLogger(__name__)

CONTROL = (KeyboardInterrupt, SystemExit, GeneratorExit, asyncio.CancelledError)
"""not failures: they end a program, a generator or a task"""


def failure_of(what: str, error: BaseException) -> RequestFailedError:
    """`what` could not be done for a request. The client learns the kind of error, the log the rest."""
    logger.error("%s failed for one request, which ends", what, exc_info=error)
    return RequestFailedError(f"{what} failed ({type(error).__name__}); the log says more")


class fails_alone:  # noqa: N801 (as `contextlib.suppress`)
    """Whatever is raised inside leaves as `EngineError`, except for what ends a program or a task. A class, since every
    streamed token passes it: a third of a generator's cost."""

    __slots__ = ("_what",)

    def __init__(self, what: str) -> None:
        self._what = what

    def __enter__(self) -> None:
        pass

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if error is not None and not isinstance(error, (EngineError, *CONTROL)):
            raise failure_of(self._what, error) from error
