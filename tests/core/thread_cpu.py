"""What threads do while they wait. Other tests' threads may still be there: a test looks at its own."""

from __future__ import annotations

import threading
import time
from collections.abc import Collection
from pathlib import Path

import psutil

LOOKS, LOOK_S = 3, 0.5


def thread_ids() -> set[int]:
    return {thread.id for thread in psutil.Process().threads()}


def assert_idle(pid: int, threads: Collection[int] | None = None, wakes: int = 3) -> None:
    """The threads of a process (None: all) neither spin nor wake up more often than `wakes` in half a second. Whoever
    polls does so in every look; a guest's clock or a page fault is felt in one."""
    seen = []
    for _ in range(LOOKS):
        before = _used(pid, threads)
        time.sleep(LOOK_S)
        seen.append(tuple(now - then for now, then in zip(_used(pid, threads), before, strict=True)))
    ticks, switches = (min(column) for column in zip(*seen, strict=True))
    assert ticks <= 1 and switches <= wakes, seen


def _used(pid: int, threads: Collection[int] | None) -> tuple[int, int]:
    """Clock ticks (10 ms) on a CPU, and times that a thread gave it up by itself."""
    ticks = switches = 0
    for task in Path(f"/proc/{pid}/task").iterdir():
        if threads is None or int(task.name) in threads:
            ticks += sum(map(int, (task / "stat").read_text().rpartition(")")[2].split()[11:13]))
            switches += int((task / "status").read_text().split("\nvoluntary_ctxt_switches:")[1].split()[0])
    return ticks, switches


def mine(others: Collection[int]) -> set[int]:
    """Threads of this process that came after `others`, but for the one that asks."""
    return thread_ids() - set(others) - {threading.get_native_id()}
