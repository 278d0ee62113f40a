"""Proof that nothing compiles after "ready": compilations of the process, counted from a mark."""

from __future__ import annotations

import sys
import weakref

_COUNTED = (
    ("frames", "total"),  # frames that Dynamo began to trace
    ("inductor", "fxgraph_cache_miss"),  # graphs that Inductor compiled
    ("inductor", "fxgraph_cache_bypass"),
    ("aot_autograd", "autograd_cache_miss"),
    ("aot_autograd", "autograd_cache_bypass"),
)
_TRITON = ("triton", "loaded")  # binaries that Triton loaded, compiled just now or taken from its cache


class _Calls:
    """A hook that counts."""

    def __init__(self) -> None:
        self.count = 0

    def __call__(self, *details: object) -> None:
        self.count += 1


class CompileCounter:
    """Counts Dynamo traces, Inductor compilations and Triton kernels of this process, whoever causes them.

    torch keeps its counters; this object only remembers where they stood. A `torch._dynamo.reset` between mark and
    question lowers them, which can hide compilations but never invents any. Triton keeps none, so this object listens
    from the first mark at which Triton is imported.
    """

    def __init__(self) -> None:
        self._before: dict[tuple[str, str], int] = {}
        self._triton = _Calls()
        self._listens = False
        self.mark()

    def mark(self) -> None:
        """From here on."""
        if not self._listens:
            self._listen()
        self._before = self._now()

    def since_mark(self) -> int:
        """Traces, compilations and loads begun since the mark; 0 is the proof."""
        now = self._now()
        return sum(max(0, now[name] - count) for name, count in self._before.items())

    def _listen(self) -> None:
        """A variant of a Triton kernel that was not warmed up is loaded at its first launch, and the launch waits."""
        knobs = sys.modules.get("triton.knobs")
        hooks = knobs and knobs.runtime.kernel_load_end_hook
        if not hooks:
            return
        hooks.add(self._triton)
        weakref.finalize(self, hooks.remove, self._triton)
        self._listens = True

    def _now(self) -> dict[tuple[str, str], int]:
        # Not imported to be asked: that takes a second. Another thread may be in the middle of it.
        counters = getattr(sys.modules.get("torch._dynamo.utils"), "counters", {})
        found = {(group, name): int(counters.get(group, {}).get(name, 0)) for group, name in _COUNTED}
        return {**found, _TRITON: self._triton.count}
