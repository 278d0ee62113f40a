"""The one error type of this room: what cannot be traced, split, compiled or trusted, and what to do about it."""

from __future__ import annotations

import re

MOST_LINES = 8
_ERROR = re.compile(r"\b[Ee]rror\b")


class CompileError(RuntimeError):
    """A module cannot be compiled in pieces, or a cache directory cannot be trusted. The message names the setting to
    change.
    """


def in_short(error: BaseException) -> str:
    """Its kind and what it says, at most so many lines: a compiler quotes all that it was given and warns of it."""
    first, *rest = str(error).splitlines() or [""]
    said = [line.strip() for line in rest if _ERROR.search(line)]
    return "\n".join([f"{type(error).__name__}: {first}", *said[:MOST_LINES]])
