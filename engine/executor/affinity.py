"""Which CPUs a thread may run on."""

from __future__ import annotations

import ctypes
import os
from collections.abc import Iterable, Sequence
from pathlib import Path

import torch

from engine.errors import ConfigError

_SIBLINGS = "/sys/devices/system/cpu/cpu{}/topology/thread_siblings_list"
_Body = ctypes.CFUNCTYPE(None, ctypes.c_int64, ctypes.c_int64, ctypes.c_void_p)


def bind_thread(cores: Sequence[int]) -> None:
    """Bind the calling thread, and those that it starts from now on, to the logical CPUs `cores`.

    Raises `ConfigError` where this process may not run on one of them, or the system cannot bind.
    """
    if not hasattr(os, "sched_setaffinity"):
        raise ConfigError("cores: this operating system does not bind threads to CPUs; leave it out")
    before = os.sched_getaffinity(0)
    try:
        os.sched_setaffinity(0, cores)
        bound = os.sched_getaffinity(0)
    except OSError as error:
        raise ConfigError(f"cores: cannot bind to CPUs {list(cores)}: {error}") from error
    if bound != set(cores):
        os.sched_setaffinity(0, before)
        raise ConfigError(f"cores: of CPUs {list(cores)} this process may run on {sorted(bound)} only")


class Places:
    """A core for each compute thread, where there are as many cores as threads; a context in which a step computes.

    Threads that wait for each other at a barrier must not share a core, and when others want to compute, too, Linux
    puts them there, for seconds: a step of 150 barriers takes 500 ms instead of 12. Where there are more cores than
    threads, they are left to the system, which has somewhere better to go.

    The thread that calls is bound while it computes only: what it starts at other times inherits where it may run.
    """

    def __init__(self, threads: int) -> None:
        """For the calling thread and torch's that help it, which are `threads` together: where the caller may run."""
        self._everywhere = os.sched_getaffinity(0) if hasattr(os, "sched_getaffinity") else set()
        places = _cores(self._everywhere)
        self._places = places if len(places) == threads > 1 else []
        if self._places:
            self._spread()

    def __enter__(self) -> None:
        if self._places:
            os.sched_setaffinity(0, self._places[0])

    def __exit__(self, *_: object) -> None:
        if self._places:
            os.sched_setaffinity(0, self._everywhere)

    def _spread(self) -> None:
        @_Body
        def bind(begin: int, end: int, _: object) -> None:
            try:
                os.sched_setaffinity(0, self._places[begin])
            except OSError:  # forbidden: all stay where they are
                self._places = []

        count = len(self._places)
        library = ctypes.CDLL(str(Path(torch.__file__).parent / "lib" / "libtorch_cpu.so"))
        library.torch_parallel_for(ctypes.c_int64(0), ctypes.c_int64(count), ctypes.c_int64(1), bind, None)
        os.sched_setaffinity(0, self._everywhere)


def _cores(cpus: Iterable[int]) -> list[set[int]]:
    """Logical CPUs by the physical cores that they are threads of."""
    cores: dict[str, set[int]] = {}
    for cpu in sorted(cpus):
        try:
            name = Path(_SIBLINGS.format(cpu)).read_text()
        except OSError:
            name = str(cpu)
        cores.setdefault(name, set()).add(cpu)
    return list(cores.values())
