"""Which graph a step replays: (phase) × {none, piecewise, full_decode, both}, settled once, looked up per step."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from compilation.errors import CompileError
from compilation.graphs.sizes import SizeTable, sizes

GraphMode = Literal["none", "piecewise", "full_decode", "both"]
Route = Literal["eager", "piecewise", "full"]


@dataclass(frozen=True)
class Dispatch:
    """How to run a step. `size` is the number of tokens after padding; `eager` runs exactly the real tokens."""

    route: Route
    size: int


class Dispatcher:
    """A table per phase. `full` needs a uniform decode (one token per sequence) and a capture-safe backend; `piecewise`
    serves any mixture of prefill and decode, because attention stays outside the graphs.

    `piecewise_sizes` and `full_sizes` are tokens; a full decode has as many sequences as tokens, so sizes beyond
    `max_num_seqs` (and piecewise sizes beyond `max_num_tokens`) are not captured at all.
    Raises CompileError for a mode that the backend cannot do.
    """

    def __init__(
        self,
        mode: GraphMode,
        *,
        backend_capture_safe: bool,
        max_num_seqs: int,
        max_num_tokens: int,
        captured: Sequence[int] | None = None,
    ) -> None:
        if mode in ("full_decode", "both") and not backend_capture_safe:
            raise CompileError(f"graphs={mode} needs a capture-safe attention backend; use graphs=piecewise or another")
        wanted = tuple(captured) if captured is not None else sizes()
        self.mode = mode
        self.piecewise_sizes = _fitting(wanted, max_num_tokens) if mode in ("piecewise", "both") else ()
        self.full_sizes = _fitting(wanted, max_num_seqs) if mode in ("full_decode", "both") else ()
        self._piecewise = SizeTable(self.piecewise_sizes)
        self._full = SizeTable(self.full_sizes)

    def dispatch(self, num_tokens: int, uniform_decode: bool) -> Dispatch:
        """O(1). `uniform_decode`: every sequence of the step has exactly one token."""
        if uniform_decode:
            size = self._full.padded(num_tokens)
            if size is not None:
                return Dispatch("full", size)
        size = self._piecewise.padded(num_tokens)
        return Dispatch("eager", num_tokens) if size is None else Dispatch("piecewise", size)


def _fitting(wanted: Sequence[int], largest: int) -> tuple[int, ...]:
    """Sizes up to `largest`, and `largest` itself if a size was cut off by it: every smaller step then has a graph."""
    kept = sorted({size for size in wanted if size <= largest})
    if any(size > largest for size in wanted) and largest >= 1 and largest not in kept:
        kept.append(largest)
    return tuple(kept)
