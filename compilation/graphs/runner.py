"""Capture and replay behind one interface; whoever can record a device's work implements `Capturer`.

Contract of static buffers. A graph replays fixed addresses, so a runner owns one buffer per input, as long as the
largest size, and every graph of size s reads the first s rows of it. Before a replay the real rows are copied in and
the *tail*, rows [num_tokens, s), is set to the padding value of that input: the values must be harmless (a token id and
a position that exist), since padded rows are computed like real ones. What makes a padded row harmless elsewhere is the
caller's: slot −1 in a slot mapping, so that nothing is written to a cache. Rows of the output beyond num_tokens are
garbage and never returned; the returned rows are a view that the next replay of any size overwrites.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Protocol

from torch import Tensor

from compilation.errors import CompileError
from compilation.graphs.dispatcher import Dispatch, Route


class Handle(Protocol):
    """One captured graph."""

    def replay(self) -> None:
        """Run the recorded work again, on what the static buffers hold now; does not wait for the device."""


class Capturer(Protocol):
    """Records what a function does to a device. Captures share one memory pool: the largest comes first."""

    def capture(self, function: Callable[[], Tensor]) -> tuple[Handle, Tensor]:
        """Warm `function` up, record one call, and return the graph with the tensor that its replays write."""


class GraphRunner:
    """Runs a step eagerly or by replay of one of its graphs, as a `Dispatch` says."""

    def __init__(
        self, run: Callable[..., Tensor], buffers: Sequence[Tensor], padding: Sequence[int | float], capturer: Capturer
    ) -> None:
        """`run(*inputs)` is what is captured; `buffers[i]` holds input i, [largest size, …]; `padding[i]` fills its
        tail.
        """
        if not buffers or len(buffers) != len(padding):
            raise CompileError(f"{len(buffers)} static buffers, {len(padding)} padding values: one of each per input")
        self._run = run
        self._buffers = tuple(buffers)
        self._padding = tuple(padding)
        self._capturer = capturer
        self._graphs: dict[tuple[Route, int], tuple[Handle, Tensor]] = {}

    def capture(self, route: Route, sizes: Sequence[int]) -> None:
        """Capture `route` at every size, largest first. Buffers are filled with padding: no real token is computed."""
        for buffer, value in zip(self._buffers, self._padding, strict=True):
            buffer.fill_(value)
        for size in sorted(set(sizes), reverse=True):
            self._check_size(size)
            inputs = [buffer[:size] for buffer in self._buffers]
            self._graphs[route, size] = self._capturer.capture(partial(self._run, *inputs))

    def captured(self, route: Route) -> tuple[int, ...]:
        """Sizes captured for `route`, ascending."""
        return tuple(sorted(size for name, size in self._graphs if name == route))

    def __call__(self, dispatch: Dispatch, *inputs: Tensor) -> Tensor:
        """Output rows of the real tokens. Raises CompileError for a graph that was not captured: nothing is captured
        late.
        """
        if dispatch.route == "eager":
            return self._run(*inputs)
        graph = self._graphs.get((dispatch.route, dispatch.size))
        if graph is None:
            raise CompileError(f"no {dispatch.route} graph of size {dispatch.size} was captured")
        num_tokens = inputs[0].size(0)
        if num_tokens > dispatch.size:
            raise CompileError(f"{num_tokens} tokens do not fit a graph of size {dispatch.size}")
        for buffer, value, real in zip(self._buffers, self._padding, inputs, strict=True):
            buffer[:num_tokens].copy_(real)
            if num_tokens < dispatch.size:
                buffer[num_tokens : dispatch.size].fill_(value)
        handle, output = graph
        handle.replay()
        return output[:num_tokens]

    def _check_size(self, size: int) -> None:
        shortest = min(buffer.size(0) for buffer in self._buffers)
        if not 0 < size <= shortest:
            raise CompileError(f"graph size {size} must be between 1 and the static buffers' {shortest} rows")
