"""The sizes at which graphs are captured, and how a number of tokens finds its size in one look-up."""

from __future__ import annotations

from collections.abc import Sequence

from compilation.errors import CompileError

LARGEST = 512
"""tokens; beyond it a step is bound by the device and a graph saves nothing"""


def sizes(largest: int = LARGEST) -> tuple[int, ...]:
    """1, 2, 4, 8, 16, 24, … up to and including `largest`: fine steps of 8, because padding is computed like real
    tokens.

    Raises CompileError if `largest` is not positive.
    """
    if largest < 1:
        raise CompileError(f"the largest graph size must be at least 1, got {largest}")
    return tuple(sorted({size for size in (1, 2, 4, *range(8, largest + 1, 8), largest) if size <= largest}))


class SizeTable:
    """For every n up to the largest size, the smallest captured size >= n."""

    def __init__(self, captured: Sequence[int]) -> None:
        ordered = sorted(set(captured))
        if ordered and ordered[0] < 1:
            raise CompileError(f"graph sizes must be positive, got {ordered[0]}")
        self._padded = [0]
        for size in ordered:
            self._padded += [size] * (size + 1 - len(self._padded))

    def padded(self, num_tokens: int) -> int | None:
        """The size to pad `num_tokens` to; None if no captured size is large enough, or there is nothing to run."""
        return self._padded[num_tokens] if 0 < num_tokens < len(self._padded) else None
