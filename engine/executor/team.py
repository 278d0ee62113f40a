"""torch's compute threads for work that is not torch's."""

from __future__ import annotations

import ctypes
from collections.abc import Callable

_Body = ctypes.CFUNCTYPE(None, ctypes.c_int64, ctypes.c_int64, ctypes.c_void_p)


class Team:
    """The calling thread and those that help it compute; where torch's are fewer, some do several parts.

    Left alone they spin for milliseconds after each parallel region, and what other threads are to do waits for a core
    (`affinity.Bystanders`).
    """

    def __init__(self, size: int) -> None:
        """Raises `OSError` or `AttributeError` where torch does not lend them."""
        self.size = size
        from torch import _C  # whoever only talks about teams needs no torch

        # Its symbols are looked for in all that it needs, wherever that lies.
        self._parallel_for = ctypes.CDLL(_C.__file__).torch_parallel_for

    def run(self, body: Callable[[int], None]) -> None:
        """`body(part)` for each part below `size`, side by side as far as it lets go of the GIL. What one raises is
        raised when all have ended."""
        failed: list[BaseException] = []
        begun: set[int] = set()

        @_Body
        def parts(begin: int, end: int, _: object) -> None:
            try:
                for part in range(begin, end):
                    begun.add(part)
                    body(part)
            except BaseException as error:  # torch knows no exceptions of Python's, nor Python Rust's panics
                failed.append(error)

        self._parallel_for(ctypes.c_int64(0), ctypes.c_int64(self.size), ctypes.c_int64(1), parts, None)
        for error in sorted(failed, key=lambda error: isinstance(error, Exception)):  # Ctrl-C before all others
            raise error
        for part in set(range(self.size)) - begun:  # what interrupts a thread on its way to one is lost in ctypes
            body(part)


def team_of(threads: int) -> Team | None:
    """None: there is nobody to help, or torch does not lend them."""
    try:
        return Team(threads) if threads > 1 else None
    except (OSError, AttributeError):
        return None
