"""Which graph a step replays: (phase) × {none, piecewise, full_decode, both}, among those that exist by now."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from compilation.errors import CompileError
from compilation.graphs.sizes import SizeTable, sizes

GraphMode = Literal["none", "piecewise", "full_decode", "both"]
Route = Literal["eager", "piecewise", "full"]

CHEAP_PADDING = 64
"""tokens; a linear layer of so few rows takes as long as reading its weights does, so padding up to here is nearly
free (GPUs compute 200 to 300 operations of bfloat16 while they read a byte)"""
TOLERATED_PADDING = 2
"""beyond, padded rows cost what real ones do: up to this multiple of the real tokens they cost less than launching
every kernel from the host"""


@dataclass(frozen=True)
class Dispatch:
    """How to run a step. `size` is the number of tokens after padding; `eager` runs exactly the real tokens."""

    route: Route
    size: int


class Dispatcher:
    """A table per route. `full` needs a uniform decode (one token per sequence) and a capture-safe backend; `piecewise`
    serves any mixture of prefill and decode, because attention stays outside the graphs.

    Only graphs that were marked as captured are dispatched to, so that steps may be served while capture goes on. A
    step wants the smallest of the wanted sizes that holds it. While that one is missing, the smallest captured size
    that holds the step serves if it is at most max(CHEAP_PADDING, TOLERATED_PADDING × tokens); otherwise the step goes
    to the next route (full, then piecewise, then eager).
    """

    def __init__(
        self,
        mode: GraphMode,
        *,
        backend_capture_safe: bool,
        max_num_seqs: int,
        max_num_tokens: int,
        wanted: Sequence[int] | None = None,
    ) -> None:
        """`wanted` sizes are tokens (default: `sizes()`); a full decode has as many sequences as tokens, so its sizes
        end at `max_num_seqs`, and piecewise ones at `max_num_tokens`. Raises CompileError for a mode that the backend
        cannot do.
        """
        if mode in ("full_decode", "both") and not backend_capture_safe:
            raise CompileError(f"graphs={mode} needs a capture-safe attention backend; use graphs=piecewise or another")
        chosen = tuple(wanted) if wanted is not None else sizes()
        self.mode = mode
        self.piecewise_sizes = _fitting(chosen, max_num_tokens) if mode in ("piecewise", "both") else ()
        self.full_sizes = _fitting(chosen, max_num_seqs) if mode in ("full_decode", "both") else ()
        self._order = _capture_order(self.piecewise_sizes, self.full_sizes)
        self._captured: set[tuple[Route, int]] = set()
        self._piecewise = _padding_table(self.piecewise_sizes, ())
        self._full = _padding_table(self.full_sizes, ())

    def dispatch(self, num_tokens: int, uniform_decode: bool) -> Dispatch:
        """O(1). `uniform_decode`: every sequence of the step has exactly one token."""
        if uniform_decode and num_tokens < len(self._full) and self._full[num_tokens]:
            return Dispatch("full", self._full[num_tokens])
        if num_tokens < len(self._piecewise) and self._piecewise[num_tokens]:
            return Dispatch("piecewise", self._piecewise[num_tokens])
        return Dispatch("eager", num_tokens)

    def mark(self, route: Route, size: int) -> None:
        """This graph exists from now on. Raises CompileError for one that is not among the wanted."""
        if (route, size) not in self._order:
            raise CompileError(f"a {route} graph of size {size} is not wanted under graphs={self.mode}")
        self._captured.add((route, size))
        wanted = self.full_sizes if route == "full" else self.piecewise_sizes
        table = _padding_table(wanted, [known for name, known in self._captured if name == route])
        if route == "full":
            self._full = table
        else:
            self._piecewise = table

    def pending(self) -> list[tuple[Route, int]]:
        """What is still to capture, in the order in which it should be.

        The largest first, for memory: after each capture its whole pool is free, and what a smaller size allocates fits
        into what a larger one has left, whatever comes between. Then by halves, so that after a handful of captures
        every step has a graph with tolerable padding. Then the rest, full decodes before mixtures.
        """
        return [graph for graph in self._order if graph not in self._captured]


def _fitting(wanted: Sequence[int], largest: int) -> tuple[int, ...]:
    """Sizes up to `largest`, and `largest` itself if a size was cut off by it: every smaller step then has a graph."""
    kept = sorted({size for size in wanted if size <= largest})
    if any(size > largest for size in wanted) and largest >= 1 and largest not in kept:
        kept.append(largest)
    return tuple(kept)


def _padding_table(wanted: Sequence[int], captured: Sequence[int]) -> tuple[int, ...]:
    """For every number of tokens up to the largest wanted size, the size to pad to, or 0."""
    ideal, usable = SizeTable(wanted), SizeTable(captured)
    table = [0]
    for tokens in range(1, max(wanted, default=0) + 1):
        size = usable.padded(tokens)
        tolerable = max(CHEAP_PADDING, TOLERATED_PADDING * tokens)
        fits = size is not None and (size <= tolerable or size == ideal.padded(tokens))
        table.append(size if size is not None and fits else 0)
    return tuple(table)


def _capture_order(piecewise: Sequence[int], full: Sequence[int]) -> tuple[tuple[Route, int], ...]:
    order: dict[tuple[Route, int], None] = {("piecewise", size): None for size in _halves(piecewise)}
    order.update({("full", size): None for size in (*_halves(full), *sorted(full, reverse=True))})
    order.update({("piecewise", size): None for size in sorted(piecewise, reverse=True)})
    return tuple(order)


def _halves(wanted: Sequence[int]) -> list[int]:
    """The largest size and then as few as possible, descending, so that each step is tolerably near to one of them."""
    chosen: list[int] = []
    left = sorted(set(wanted))
    while left and (not chosen or chosen[-1] > CHEAP_PADDING):
        # a step of fewer than `uncovered + 1` tokens would be padded more than tolerably by the size chosen last
        uncovered = -(-chosen[-1] // TOLERATED_PADDING) - 1 if chosen else left[-1]
        chosen.append(next((size for size in left if size >= uncovered), left[-1]))
        left = [size for size in left if size < chosen[-1]]
    return chosen
