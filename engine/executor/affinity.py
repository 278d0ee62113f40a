"""Which CPUs a thread may run on."""

from __future__ import annotations

import os
import threading
from collections.abc import Iterable, Sequence
from contextlib import suppress
from pathlib import Path

from engine.errors import ConfigError
from engine.executor.team import team_of

_SIBLINGS = "/sys/devices/system/cpu/cpu{}/topology/thread_siblings_list"


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
    threads, they are left to the system, which has somewhere better to go; and where it does not let us, or takes a
    core away, too: no step fails for that.

    The thread that calls is bound while it computes only: what it starts at other times inherits where it may run.
    """

    def __init__(self, threads: int) -> None:
        """For the calling thread and torch's that help it, which are `threads` together: where the caller may run."""
        self._everywhere = os.sched_getaffinity(0) if hasattr(os, "sched_getaffinity") else set()
        self._before: set[int] | None = None
        """where the calling thread may run when it does not compute; None: it has not been bound"""
        places = _cores(self._everywhere)
        self._places = places if len(places) == threads > 1 and _bind_team(places) else []

    def __enter__(self) -> None:
        if self._places:
            try:
                before = os.sched_getaffinity(0)
                if self._places[0] <= before:
                    os.sched_setaffinity(0, self._places[0])
                    self._before = before
            except OSError:
                self._places = []

    def __exit__(self, *_: object) -> None:
        if self._before is not None:
            with suppress(OSError):
                os.sched_setaffinity(0, self._before)
            self._before = None

    def close(self) -> None:
        """In the thread that has made it: its helpers may run everywhere again."""
        if self._places:
            _bind_team([self._everywhere] * len(self._places))
            self._places = []


def _bind_team(places: list[set[int]]) -> bool:
    """The calling thread and those of torch's that help it, each to its own of as many places. False, and all may run
    where the caller may: not all of them could be."""
    everywhere = os.sched_getaffinity(0)
    team = team_of(len(places))
    if team is None:
        return False

    def to(wanted: list[set[int]]) -> bool:
        bound: list[int] = []

        def bind(part: int) -> None:
            with suppress(OSError):
                os.sched_setaffinity(0, wanted[part])
                bound.append(threading.get_native_id())

        team.run(bind)
        return len(set(bound)) == len(wanted)

    try:
        if to(places):
            return True
        to([everywhere] * len(places))
    finally:
        with suppress(OSError):
            os.sched_setaffinity(0, everywhere)
    return False


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
