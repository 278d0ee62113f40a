"""Everything that was captured, by (route, size), and the one way to replay it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Protocol

import torch
from torch import Tensor

from compilation.errors import CompileError
from compilation.graphs.capture import Capturer, Handle
from compilation.graphs.dispatcher import Route
from compilation.graphs.piecewise import capture_pieces
from compilation.graphs.weak import weak_alias
from compilation.interface import CompiledModel


class _Graph(Protocol):
    def replay(self) -> Tensor: ...


class _FullGraph:
    """The whole program as one graph."""

    def __init__(self, handle: Handle, output: Tensor) -> None:
        self._handle = handle
        self._output = output

    def replay(self) -> Tensor:
        self._handle.replay()
        return self._output


def _leave_out(*args: object, **kwargs: object) -> None:
    """Stand-in for a bound function during warm-up."""


class GraphSet:
    """Owns the graphs of one program. All calls come from one thread.

    Contract of inputs. Graphs read the runner's own static buffers, `inputs[i]` [largest size, …], never copies of
    them: a graph of size s reads their first s rows. Whoever builds a step writes its real rows and its *tail*, rows
    [tokens, s), before the replay: padded rows are computed like real ones, so an id or a position in the tail must
    exist (0 does), and a slot must be −1, so that nothing is written to a cache. Floating tails may hold anything, NaN
    included: pieces are token-wise, no row reads another.
    """

    def __init__(
        self,
        inputs: Sequence[Tensor],
        capturer: Capturer,
        before_capture: Callable[[Route, int], None],
        run: Callable[..., Tensor],
        compiled: CompiledModel,
        stand_in: Callable[..., object] = _leave_out,
    ) -> None:
        """`run(*inputs)` is what a full graph records, bound functions included; a piecewise one records
        `compiled`'s pieces. `before_capture(route, size)` must leave a padded step without effect in the static
        buffers, and, for the full route, in what the bound functions read. `stand_in` replaces the bound functions
        while a piecewise program warms up (by default they are left out: their results are garbage anyway).
        """
        if not inputs:
            raise CompileError("a graph needs at least one static input buffer")
        self._inputs = tuple(inputs)
        self._capturer = capturer
        self._before_capture = before_capture
        self._run = run
        self._compiled = compiled
        self._stand_in = stand_in
        self._graphs: dict[tuple[Route, int], _Graph] = {}

    def capture(self, route: Route, size: int) -> None:
        """Warm up and capture. The first size of a pool should be the largest: smaller ones then fit into its memory.

        Replaces a graph of the same route and size. Raises CompileError for a size beyond the buffers, for the eager
        route, and for the piecewise route of a model that is not compiled in pieces; what the device or a bound
        function raises passes through, and the route then has no graph of that size.
        """
        shortest = min(buffer.size(0) for buffer in self._inputs)
        if not 0 < size <= shortest:
            raise CompileError(f"graph size {size} must be between 1 and the static buffers' {shortest} rows")
        if route not in ("piecewise", "full"):
            raise CompileError(f"route {route} has no graphs; capture piecewise or full")
        self._graphs.pop((route, size), None)
        inputs = [buffer[:size] for buffer in self._inputs]
        with torch.inference_mode():
            self._before_capture(route, size)
            with self._capturer.session():
                graph = self._piecewise(inputs) if route == "piecewise" else self._full(inputs)
        self._graphs[route, size] = graph

    def replay(self, route: Route, size: int) -> Tensor:
        """Queue the graph on the current stream; its output, [size, …], is valid until the next replay of any graph
        (captures execute nothing). Rows of the tail are garbage.

        Raises CompileError for a graph that was not captured: nothing is captured late.
        """
        graph = self._graphs.get((route, size))
        if graph is None:
            raise CompileError(f"no {route} graph of size {size} was captured")
        return graph.replay()

    def captured(self, route: Route) -> tuple[int, ...]:
        """Sizes captured for `route`, ascending."""
        return tuple(sorted(size for name, size in self._graphs if name == route))

    def memory_bytes(self) -> int:
        """Device memory that all captures have taken so far."""
        return self._capturer.memory_bytes()

    def _piecewise(self, inputs: Sequence[Tensor]) -> _Graph:
        warm = self._compiled.rewire(lambda piece: piece, lambda function: self._stand_in)
        self._capturer.warm_up(partial(warm, *inputs))
        return capture_pieces(self._compiled.rewire, inputs, self._capturer)

    def _full(self, inputs: Sequence[Tensor]) -> _Graph:
        self._capturer.warm_up(partial(self._run, *inputs))
        handle, output = self._capturer.capture(partial(self._run, *inputs))
        return _FullGraph(handle, weak_alias(output))
