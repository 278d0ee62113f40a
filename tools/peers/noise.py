"""What else uses the machine's CPU while something is measured: a figure taken beside a busy neighbour says so."""

from __future__ import annotations

import os
import time
from dataclasses import dataclass
from types import TracebackType
from typing import Self

import psutil


@dataclass(frozen=True)
class Load:
    """In cores, averaged over the time of the measurement."""

    own: float
    outside: float
    steal: float
    """taken by the hypervisor"""


class Watch:
    """`with Watch() as watch: ...`; then `watch.load`. Own is this process with all its children."""

    load: Load

    def __enter__(self) -> Self:
        self._start = time.perf_counter()
        self._before = (*_machine_seconds(), _tree_seconds())
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        elapsed = max(1e-9, time.perf_counter() - self._start)
        busy, steal, own = (after - was for after, was in zip((*_machine_seconds(), _tree_seconds()), self._before))
        self.load = Load(own / elapsed, max(0.0, (busy - own) / elapsed), steal / elapsed)


def wait_until_quiet(limit_cores: float, timeout_s: float, window_s: float = 0.5) -> float:
    """Waits until others use less than `limit_cores`, at most `timeout_s`; the seconds that it took."""
    start = time.perf_counter()
    while time.perf_counter() - start < timeout_s:
        with Watch() as watch:
            time.sleep(window_s)
        if watch.load.outside < limit_cores:
            break
    return time.perf_counter() - start


def _machine_seconds() -> tuple[float, float]:
    times = psutil.cpu_times()
    busy = times.user + times.nice + times.system + getattr(times, "irq", 0.0) + getattr(times, "softirq", 0.0)
    return busy, getattr(times, "steal", 0.0)


def _tree_seconds() -> float:
    """Processes that ended count through their parent's `children_*`."""
    total = 0.0
    this = psutil.Process(os.getpid())
    for process in (this, *this.children(recursive=True)):
        try:
            times = process.cpu_times()
        except psutil.Error:
            continue
        total += times.user + times.system + times.children_user + times.children_system
    return total
