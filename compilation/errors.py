"""The one error type of this room: what cannot be traced, split, compiled or trusted, and what to do about it."""

from __future__ import annotations


class CompileError(RuntimeError):
    """A module cannot be compiled in pieces, or a cache directory cannot be trusted. The message names the setting to
    change.
    """
