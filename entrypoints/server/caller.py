"""Whose HTTP request a task serves. Every task has its own, and what it starts inherits it, so that the log, and what
watches requests, know of it without being told by each route."""

from __future__ import annotations

from collections.abc import Iterable
from contextvars import ContextVar
from typing import NamedTuple

TIMEOUT_HEADER = "x-request-timeout"


class Caller(NamedTuple):
    request_id: str
    path: str
    headers: Iterable[tuple[bytes, bytes]]
    """names in lower case"""
    watched: set[str]
    """what the engine was asked for on its behalf"""
    arrived: float
    """on `time.monotonic`'s clock"""

    @property
    def timeout(self) -> str | None:
        """What its header says of the time in which its request must end."""
        given = [value for name, value in self.headers if name == TIMEOUT_HEADER.encode()]
        return given[-1].decode("latin-1") if given else None


CALLER: ContextVar[Caller | None] = ContextVar("caller", default=None)


def caller_id() -> str | None:
    caller = CALLER.get()
    return None if caller is None else caller.request_id
