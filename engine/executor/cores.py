"""The physical cores of this machine, and a rank's share of them."""

from __future__ import annotations

import os
from collections.abc import Iterable
from pathlib import Path

_SIBLINGS = "/sys/devices/system/cpu/cpu{}/topology/thread_siblings_list"


def cores_of(cpus: Iterable[int]) -> list[set[int]]:
    """Logical CPUs by the physical cores that they are threads of."""
    cores: dict[str, set[int]] = {}
    for cpu in sorted(cpus):
        try:
            name = Path(_SIBLINGS.format(cpu)).read_text()
        except OSError:
            name = str(cpu)
        cores.setdefault(name, set()).add(cpu)
    return list(cores.values())


def share_of_cores(rank: int, ranks: int, threads: int) -> tuple[int, ...] | None:
    """The logical CPUs of the physical cores of one of `ranks` ranks, each with `threads` compute threads, of those
    where the caller may run. None: there are not exactly as many cores as threads, and the system places them better.
    """
    cores = cores_of(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else []
    if len(cores) != ranks * threads:
        return None
    return tuple(sorted(cpu for core in cores[rank * threads : (rank + 1) * threads] for cpu in core))
