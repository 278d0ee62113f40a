"""What one request raises is its own end, and nobody else's.

Libraries in Rust raise `PanicException` for their own defects: a `BaseException`, which every `except Exception` lets
pass. Here it counts as any other failure of the request at hand; only what is meant for the interpreter or for the
task does not.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Iterator
from contextlib import contextmanager

from engine.errors import EngineError, RequestFailedError

logger = logging.getLogger(__name__)

CONTROL = (KeyboardInterrupt, SystemExit, GeneratorExit, asyncio.CancelledError)
"""not failures: they end a program, a generator or a task"""


def failure_of(what: str, error: BaseException) -> RequestFailedError:
    """`what` could not be done for a request. The client learns the kind of error, the log the rest."""
    logger.error("%s failed for one request, which ends", what, exc_info=error)
    return RequestFailedError(f"{what} failed ({type(error).__name__}); the log says more")


@contextmanager
def fails_alone(what: str) -> Iterator[None]:
    """Whatever is raised inside leaves as `EngineError`, except for what ends a program or a task."""
    try:
        yield
    except (EngineError, *CONTROL):
        raise
    except BaseException as error:
        raise failure_of(what, error) from error
