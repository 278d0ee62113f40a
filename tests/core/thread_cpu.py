"""CPU time of some threads of this process: what other tests left running is not what a test measures."""

from __future__ import annotations

import time
from collections.abc import Collection

import psutil


def thread_ids() -> set[int]:
    return {thread.id for thread in psutil.Process().threads()}


def cpu_s(threads: Collection[int]) -> float:
    """Seconds on a core of those threads together, in steps of a clock tick (10 ms)."""
    times = (thread for thread in psutil.Process().threads() if thread.id in threads)
    return float(sum(thread.user_time + thread.system_time for thread in times))


def used_in_a_second(process: psutil.Process, threads: Collection[int]) -> tuple[float, int, float]:
    """CPU seconds of the process, its voluntary context switches, CPU seconds of the threads here."""
    before, mine, switches = process.cpu_times(), cpu_s(threads), process.num_ctx_switches()
    time.sleep(1.0)
    after = process.cpu_times()
    used = after.user + after.system - before.user - before.system
    return used, process.num_ctx_switches().voluntary - switches.voluntary, cpu_s(threads) - mine
