"""How long a linear layer takes, as it will run: replayed from a CUDA graph, with weights that come from memory."""

from __future__ import annotations

import itertools
import math
import statistics
from collections.abc import Callable
from typing import Protocol

import torch

from compilation.graphs.cuda import CudaCapturer

_SAMPLES = 5
_BYTES_PER_GRAPH = 1 << 30
"""read by one replay, so that its launch is lost in it: about 0.2 ms on an H200"""
_MAX_CALLS = 128
_COPY_BYTES = 256 << 20
"""several times what any L2 holds"""


class LinearTimer(Protocol):
    multiprocessors: int
    l2_bytes: int

    def median_us(self, call: Callable[[int], object], copies: int, size_bytes: int) -> float:
        """One `call(i)`, i going through `copies` sets of weights of `size_bytes` each."""
        ...

    def copy_gb_per_s(self) -> float:
        """What a copy within the device's memory reaches now, read and written bytes together."""
        ...


class CudaTimer:
    """See `LinearTimer`."""

    def __init__(self, device: torch.device) -> None:
        properties = torch.cuda.get_device_properties(device)
        self.multiprocessors = int(properties.multi_processor_count)
        self.l2_bytes = int(properties.L2_cache_size)
        self._device = device
        self._stream = torch.cuda.current_stream(device)
        self._capturer = CudaCapturer(device)

    def median_us(self, call: Callable[[int], object], copies: int, size_bytes: int) -> float:
        cycles = math.ceil(min(_BYTES_PER_GRAPH // size_bytes, _MAX_CALLS) / copies)
        calls = copies * max(1, cycles)

        def cycle() -> None:
            for i in range(calls):
                call(i % copies)

        with self._capturer.session():
            self._capturer.warm_up(lambda: call(0))
            graph, _ = self._capturer.capture(cycle)
        graph.replay()
        marks = [self._mark()]
        for _ in range(_SAMPLES):
            graph.replay()
            marks.append(self._mark())
        marks[-1].synchronize()
        times = [float(start.elapsed_time(end)) for start, end in itertools.pairwise(marks)]
        return 1e3 * statistics.median(times) / calls

    def copy_gb_per_s(self) -> float:
        free = torch.cuda.mem_get_info(self._device)[0]
        count = min(_COPY_BYTES, free // 8)
        source = torch.zeros(count, dtype=torch.uint8, device=self._device)
        target = torch.empty_like(source)
        return 2 * count / self.median_us(lambda i: target.copy_(source), 1, count) / 1e3

    def _mark(self) -> torch.cuda.Event:
        event = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]  # torch leaves it untyped
        event.record(self._stream)
        return event
