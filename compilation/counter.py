"""Proof that nothing compiles after "ready": compilations of the process, counted from a mark."""

from __future__ import annotations

from torch._dynamo.utils import counters

_COUNTED = (
    ("frames", "total"),  # frames that Dynamo began to trace
    ("inductor", "fxgraph_cache_miss"),  # graphs that Inductor compiled
    ("inductor", "fxgraph_cache_bypass"),
    ("aot_autograd", "autograd_cache_miss"),
    ("aot_autograd", "autograd_cache_bypass"),
)


class CompileCounter:
    """Counts Dynamo traces and Inductor compilations of this process, whoever causes them.

    torch keeps the counters; this object only remembers where they stood. A `torch._dynamo.reset` between mark and
    question lowers them, which can hide compilations but never invents any.
    """

    def __init__(self) -> None:
        self._before: dict[tuple[str, str], int] = {}
        self.mark()

    def mark(self) -> None:
        """From here on."""
        self._before = self._now()

    def since_mark(self) -> int:
        """Traces and compilations begun since the mark; 0 is the proof."""
        now = self._now()
        return sum(max(0, now[name] - count) for name, count in self._before.items())

    @staticmethod
    def _now() -> dict[tuple[str, str], int]:
        return {(group, name): int(counters[group][name]) for group, name in _COUNTED}
