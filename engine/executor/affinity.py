"""Which CPUs a thread may run on."""

from __future__ import annotations

import os
import threading
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

import torch

from attention_backends.crew import helpers_of_this_thread
from attention_backends.toolchain import BuildError
from engine.errors import ConfigError
from engine.executor.cores import cores_of
from engine.executor.team import team_of


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


class Binding:
    """The calling thread, bound to CPUs until `undo`, for which it need not be the caller."""

    def __init__(self, cores: Sequence[int]) -> None:
        """Raises as `bind_thread`."""
        self._thread = threading.get_native_id()
        self._before = os.sched_getaffinity(0) if hasattr(os, "sched_getaffinity") else set()
        bind_thread(cores)

    def undo(self) -> None:
        """What it started meanwhile stays where it is."""
        if Path(f"/proc/self/task/{self._thread}").exists():  # its number is nobody else's by now
            _bind(self._thread, self._before)


class Places:
    """A core for each compute thread, where there are as many cores as threads; a context in which a step computes.

    When others want to compute, too, Linux puts two compute threads on one core and leaves them there for seconds.
    Where there are more cores than threads, they are left to the system, which has somewhere better to go; and where it
    does not let us, or takes a core away, too: no step fails for that.

    The thread that calls is bound while it computes only: what it starts at other times inherits where it may run.
    torch's own threads have no core for themselves then, so they are kept from spinning (`Bystanders`).
    """

    def __init__(self, threads: int, cache_dir: Path) -> None:
        """For the calling thread and the crew that helps it, `threads` together: where the caller may run."""
        self._everywhere = os.sched_getaffinity(0) if hasattr(os, "sched_getaffinity") else set()
        self._before: set[int] | None = None
        """where the calling thread may run when it does not compute; None: it has not been bound"""
        self._places = cores_of(self._everywhere)
        self._helpers: list[int] = []
        self._bystanders: Bystanders | None = None
        if not len(self._places) == threads > 1 or not self._bind_helpers(cache_dir):
            self._places = []

    def _bind_helpers(self, cache_dir: Path) -> bool:
        """False, and all may run where the caller may: not all of them could be bound."""
        try:
            self._helpers = helpers_of_this_thread(len(self._places) - 1, cache_dir)
        except (BuildError, RuntimeError):
            return False
        bound = [_bind(helper, place) for helper, place in zip(self._helpers, self._places[1:], strict=False)]
        if len(bound) == len(self._places) - 1 and all(bound):
            self._bystanders = Bystanders(len(self._everywhere))
            return True
        self.close()
        return False

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
        """The helpers may run everywhere again."""
        for helper in self._helpers:
            if Path(f"/proc/self/task/{helper}").exists():  # its number is nobody else's by now
                _bind(helper, self._everywhere)
        self._helpers, self._places = [], []
        if self._bystanders is not None:
            self._bystanders.close()
            self._bystanders = None


class Bystanders:
    """Threads that do nothing, as many as there are CPUs. While they live, those that OpenMP starts for torch sleep
    when they have nothing to do; otherwise they spin for 7 ms after each parallel region, on cores where the crew
    computes. GNU's OpenMP does so where its threads are more than the cores (GOMP_SPINCOUNT); no other one is harmed.
    """

    def __init__(self, threads: int) -> None:
        self._leave = threading.Event()
        there = threading.Event()
        thread = threading.Thread(target=self._stand, args=(threads, there), name="bystanders", daemon=True)
        thread.start()
        there.wait()

    def _stand(self, threads: int, there: threading.Event) -> None:
        try:
            if (team := team_of(threads)) is not None:
                before = torch.get_num_threads()
                torch.set_num_threads(threads)
                team.run(lambda part: None)
                torch.set_num_threads(before)
        finally:
            there.set()
        self._leave.wait()

    def close(self) -> None:
        self._leave.set()


def _bind(thread: int, cpus: set[int]) -> bool:
    try:
        os.sched_setaffinity(thread, cpus)
    except OSError:
        return False
    return True
