"""CPU time of some threads of this process: what other tests left running is not what a test measures."""

from __future__ import annotations

from collections.abc import Collection

import psutil


def thread_ids() -> set[int]:
    return {thread.id for thread in psutil.Process().threads()}


def cpu_s(threads: Collection[int]) -> float:
    """Seconds on a core of those threads together, in steps of a clock tick (10 ms)."""
    times = (thread for thread in psutil.Process().threads() if thread.id in threads)
    return float(sum(thread.user_time + thread.system_time for thread in times))
