"""Whose HTTP request a task serves. Every task has its own, and what it starts inherits it, so that the log, and what
watches requests, know of it without being told by each route."""

from __future__ import annotations

from collections.abc import Iterable
from contextvars import ContextVar
from typing import NamedTuple


class Caller(NamedTuple):
    request_id: str
    path: str
    headers: Iterable[tuple[bytes, bytes]]
    """names in lower case"""
    watched: set[str]
    """what the engine was asked for on its behalf"""
    arrived: float
    """on `time.monotonic`'s clock"""


CALLER: ContextVar[Caller | None] = ContextVar("caller", default=None)


def caller_id() -> str | None:
    caller = CALLER.get()
    return None if caller is None else caller.request_id
