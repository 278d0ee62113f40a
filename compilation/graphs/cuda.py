"""CUDA's capture. `torch.cuda.graph` collects garbage, empties the cache and waits for the device at each entry, which
is fatal for thousands of pieces captured while requests are served; so capture begins and ends here directly."""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress

import torch

from compilation.graphs.capture import Handle, T


class CudaCapturer:
    """Captures on one side stream into one memory pool.

    One stream, because the allocator gives a freed block only to the stream that it was allocated for: captures on
    several streams would not reuse each other's memory. Graphs replay on whatever stream is current then; all of a
    capturer's graphs must replay on the same one, in which order of replay is order of execution.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]  # torch leaves it untyped
        self._pool = torch.cuda.graph_pool_handle()
        self._anchor: torch.cuda.CUDAGraph | None = None
        """some graph of the pool: a pool dies with its last graph, and its handle cannot be used again after that, nor
        after a capture that could not be ended"""
        self._broken: list[torch.cuda.CUDAGraph] = []
        """captures that could not be ended: torch's allocators may go on asking them which streams are theirs"""
        self._taken_bytes = 0

    @contextmanager
    def session(self) -> Iterator[None]:
        """Within, the garbage collector is off: one that destroyed a graph or an event would invalidate the capture,
        and one that only walks the heap costs more than a capture."""
        collecting = gc.isenabled()
        gc.disable()
        free = self._free_bytes()
        try:
            yield
        finally:
            self._taken_bytes += max(0, free - self._free_bytes())
            if collecting:
                gc.enable()

    def warm_up(self, function: Callable[[], object]) -> None:
        """On the capture stream, because libraries keep workspaces per stream: one that was made during capture would
        lie in the pool. Ordered after and before the caller's stream on the device (graphs that replay there use the
        same workspaces); the host does not wait."""
        caller = torch.cuda.current_stream(self._device)
        self._stream.wait_stream(caller)
        with torch.cuda.stream(self._stream):
            function()
        caller.wait_stream(self._stream)

    def capture(self, function: Callable[[], T]) -> tuple[Handle, T]:
        """Capture mode "thread_local": other threads may call CUDA meanwhile (a loader, a copy that is awaited)."""
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.stream(self._stream):
            try:
                graph.capture_begin(pool=self._pool, capture_error_mode="thread_local")
                result = function()
                graph.capture_end()
            except BaseException:
                ended = _ended(graph)
                if not ended:
                    self._abandon(graph)
                if not ended or self._anchor is None:
                    self._pool, self._anchor = torch.cuda.graph_pool_handle(), None
                raise
        self._anchor = self._anchor or graph
        return graph, result

    def _abandon(self, graph: torch.cuda.CUDAGraph) -> None:
        """torch leaves an invalidated capture half open: until somebody ends it, the allocator neither processes events
        nor, when memory is short, gives back what it caches."""
        self._broken.append(graph)
        end: Callable[[int, tuple[int, int]], None] = torch._C._cuda_endAllocateToPool
        with suppress(RuntimeError):  # torch had ended it
            end(self._device.index or 0, self._pool)

    def memory_bytes(self) -> int:
        """Of the device, not of the allocator: instantiated graphs take memory that the allocator does not see. Other
        processes that allocate during a session are counted in."""
        return self._taken_bytes

    def _free_bytes(self) -> int:
        return int(torch.cuda.mem_get_info(self._device)[0])


def _ended(graph: torch.cuda.CUDAGraph) -> bool:
    """Leave capture mode after an error; an invalidated capture says once more that it is."""
    try:
        graph.capture_end()
    except RuntimeError:
        return False
    return True
