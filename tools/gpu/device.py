"""Everything the suite asks of CUDA, behind one small interface, so that a machine without a GPU runs the same code.

`CudaDevice` is `torch.cuda`. `DryDevice` is the same on the tests' pretend GPU (see `gpu.context.pretending`), where a
profile is a stopwatch. What it measures means nothing; that every line ran is the point.
"""

from __future__ import annotations

import contextlib
import gc
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch

MAX_NAMES, MAX_NAME = 14, 90
"""of kernels in a profile, and characters of each"""


@dataclass(frozen=True)
class Profile:
    """What kernels and copies did."""

    busy_ms: float
    """how long some ran; overlaps are counted once"""
    count: int
    by_name_ms: dict[str, float]
    """those that took longest, in sum"""


class Device(ABC):
    """One device; work is queued to its current stream."""

    dry: bool
    torch_device: torch.device

    @abstractmethod
    def describe(self) -> dict[str, str | int | float]:
        """What the machine is, for the report."""

    @property
    @abstractmethod
    def l2_bytes(self) -> int: ...

    @abstractmethod
    def synchronize(self) -> None: ...

    @abstractmethod
    def record(self) -> object:
        """A mark in the stream's work."""

    @abstractmethod
    def elapsed_ms(self, start: object, end: object) -> float:
        """Between two marks; waits for both."""

    @abstractmethod
    def capture(self, function: Callable[[], object]) -> Callable[[], None]:
        """Record what `function` queues, once it has run and been warmed up; the result replays it."""

    @abstractmethod
    def sync_is_error(self) -> contextlib.AbstractContextManager[None]:
        """Inside, a hidden wait for the device raises RuntimeError, in every thread."""

    @abstractmethod
    def waits_are_fine(self) -> None: ...

    @abstractmethod
    def profile(self, function: Callable[[], object]) -> Profile:
        """Run `function` under a profiler."""

    def release_memory(self) -> None:
        """Give freed memory back, so that the next owner finds it."""
        gc.collect()

    def poison_free_memory(self, size_bytes: int) -> None:
        """Leave NaN in memory that the allocator will hand out again: who reads what nobody wrote will see it."""
        torch.full((size_bytes // 4,), float("nan"), device=self.torch_device)


class CudaDevice(Device):
    dry = False

    def __init__(self) -> None:
        if not torch.cuda.is_available():
            raise RuntimeError("no CUDA device: run with --dry to exercise the suite without one")
        self.torch_device = torch.device("cuda", 0)
        torch.cuda.set_device(0)
        self._properties = torch.cuda.get_device_properties(0)

    def describe(self) -> dict[str, str | int | float]:
        return {
            "name": self._properties.name,
            "compute_capability": f"{self._properties.major}.{self._properties.minor}",
            "multiprocessors": self._properties.multi_processor_count,
            "memory_bytes": self._properties.total_memory,
            "l2_bytes": self.l2_bytes,
            "torch": torch.__version__,
            "cuda": str(torch.version.cuda),
        }

    @property
    def l2_bytes(self) -> int:
        return int(self._properties.L2_cache_size)

    def synchronize(self) -> None:
        torch.cuda.synchronize()

    def record(self) -> object:
        event = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]  # torch leaves it untyped
        event.record()
        return event

    def elapsed_ms(self, start: object, end: object) -> float:
        assert isinstance(start, torch.cuda.Event) and isinstance(end, torch.cuda.Event)
        end.synchronize()
        return float(start.elapsed_time(end))

    def capture(self, function: Callable[[], object]) -> Callable[[], None]:
        side = torch.cuda.Stream()  # type: ignore[no-untyped-call]  # torch leaves it untyped
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            function()
        torch.cuda.current_stream().wait_stream(side)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, capture_error_mode="thread_local"):
            function()
        return graph.replay

    @contextlib.contextmanager
    def sync_is_error(self) -> Iterator[None]:
        torch.cuda.set_sync_debug_mode("error")
        try:
            yield
        finally:
            self.waits_are_fine()

    def waits_are_fine(self) -> None:
        """An engine with `debug_sync`, whose step began within `sync_is_error`, puts that mode back when it ends."""
        torch.cuda.set_sync_debug_mode("default")

    def profile(self, function: Callable[[], object]) -> Profile:
        from torch._C._autograd import DeviceType
        from torch.profiler import ProfilerActivity, profile

        self.synchronize()
        with profile(activities=[ProfilerActivity.CUDA]) as profiler:
            function()
            self.synchronize()
        events = [e for e in profiler.events() or [] if e.device_type == DeviceType.CUDA]
        spans = sorted((e.time_range.start, e.time_range.end) for e in events if e.time_range.end > e.time_range.start)
        sums: dict[str, float] = {}
        for event in events:
            name = event.name[:MAX_NAME]
            sums[name] = sums.get(name, 0.0) + (event.time_range.end - event.time_range.start) / 1e3
        longest = sorted(sums, key=lambda name: -sums[name])[:MAX_NAMES]
        return Profile(union_length(spans) / 1e3, len(spans), {name: sums[name] for name in longest})

    def release_memory(self) -> None:
        super().release_memory()
        torch.cuda.empty_cache()


class DryDevice(CudaDevice):
    """The pretend GPU, within `pretending`."""

    dry = True

    def describe(self) -> dict[str, str | int | float]:
        return super().describe() | {"name": "none (dry run on a CPU)"}

    def profile(self, function: Callable[[], object]) -> Profile:
        started = time.perf_counter()
        function()
        return Profile(0.9e3 * (time.perf_counter() - started), 1, {})


def union_length(spans: list[tuple[float, float]]) -> float:
    """Length of the union of intervals, sorted by their start."""
    total, reached = 0.0, float("-inf")
    for start, end in spans:
        total += max(0.0, end - max(start, reached))
        reached = max(reached, end)
    return total


def open_device(dry: bool) -> Device:
    """Raises RuntimeError where a GPU is asked for and there is none."""
    return DryDevice() if dry else CudaDevice()
