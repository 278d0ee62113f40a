"""What an executor runs its steps with."""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

from compilation.behind import CompileJob
from engine.adapters.tables import AdapterTables
from engine.kv_transfer.memory import KVMemory
from engine.observability.step_profile import PartTimes
from engine.reports import LoadReport, WarmUpReport
from engine.step import StepMasks, StepPlan, StepResult


class Pending(Protocol):
    @property
    def at_hand(self) -> bool:
        """`wait` returns at once."""
        ...

    def wait(self) -> StepResult: ...


class Runner(Protocol):
    """What a worker thread runs; `ModelRunner` is one."""

    @property
    def report(self) -> LoadReport: ...

    def allocate(self, num_blocks: int, num_host_blocks: int = 0) -> None: ...

    def warm_up(self) -> WarmUpReport: ...

    def compile_job(self) -> CompileJob | None:
        """What is left to compile after `warm_up`, to be run in another thread; None: nothing is."""
        ...

    def execute(self, plan: StepPlan, masks: Callable[[], StepMasks] = ...) -> Pending:
        """`masks` waits for what a plan with masked rows is to be told; it is called when the forward pass has been
        started."""
        ...

    @property
    def part_times(self) -> PartTimes:
        """What its thread spends on each part of its steps."""
        ...

    def kv_memory(self) -> KVMemory: ...

    @property
    def adapters(self) -> AdapterTables | None: ...

    def idle_work(self) -> bool:
        """A bounded piece of work between steps, after `warm_up`; False when nothing is left."""
        ...

    def compiles_after_ready(self) -> int: ...
