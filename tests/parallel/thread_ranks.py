"""The oracle of engines of several ranks: an executor whose ranks are threads of one process, which compute all parts
and add them up in the order of ranks with plain torch."""

from __future__ import annotations

import functools
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

from thread_group import Meeting, ThreadGroup

from engine.adapters.interface import AdapterLoader
from engine.adapters.request import LoRARequest
from engine.adapters.store import AdapterStore
from engine.config import EngineConfig
from engine.executor.inline import InlineExecutor
from engine.executor.interface import CompileState
from engine.executor.rank_reports import group_load_report, group_warm_up_report
from engine.executor.team import Team
from engine.machine import main_memory
from engine.reports import LoadReport, WarmUpReport
from engine.runner.loading import load_parts
from engine.runner.model_runner import ModelRunner
from engine.step import StepMasks, StepPlan, StepResult

T = TypeVar("T")


class ThreadRanks:
    """See `engine.executor.interface.Executor`."""

    def __init__(self, config: EngineConfig) -> None:
        size = config.parallel.tensor
        meeting = Meeting(size)
        self._meeting = meeting
        self._threads = [ThreadPoolExecutor(1) for _ in range(size)]
        self._ranks = [InlineExecutor(config, self._loader(ThreadGroup(rank, meeting))) for rank in range(size)]

    @staticmethod
    def _loader(group: ThreadGroup) -> Callable[[EngineConfig], ModelRunner]:
        return lambda config: ModelRunner.load(config, functools.partial(load_parts, group=group))

    def _all(self, work: Callable[[InlineExecutor], T]) -> list[T]:
        def run(rank: InlineExecutor) -> T:
            try:
                return work(rank)
            except BaseException:
                self._meeting.barrier.abort()
                raise

        futures = [thread.submit(run, rank) for thread, rank in zip(self._threads, self._ranks, strict=True)]
        return [future.result() for future in futures]

    def load(self) -> LoadReport:
        memory = main_memory()
        return group_load_report("cpu", self._all(lambda rank: rank.load()), memory)

    def allocate(self, num_blocks: int, num_host_blocks: int = 0) -> None:
        self._all(lambda rank: rank.allocate(num_blocks, num_host_blocks))

    def warm_up(self) -> WarmUpReport:
        return group_warm_up_report(self._all(lambda rank: rank.warm_up()))

    def compile_state(self) -> CompileState:
        return "done"

    def watch_compilation(self, changed: Callable[[], None]) -> None:
        changed()

    def submit(self, plan: StepPlan, done: Callable[[], None]) -> None:
        for rank in self._ranks:
            rank.submit(plan, lambda: None)
        done()

    def sample(self, masks: StepMasks) -> None:
        for rank in self._ranks:
            rank.sample(masks)

    def collect(self) -> StepResult:
        return self._all(lambda rank: rank.collect())[0]

    def compiles_after_ready(self) -> int:
        return 0

    def part_seconds(self) -> dict[str, float]:
        return self._ranks[0].part_seconds()

    def team(self) -> Team | None:
        return None

    def adapters(self, notify: Callable[[LoRARequest], None] | None) -> AdapterLoader:
        return _ThreadAdapters([rank.adapters(None) for rank in self._ranks])

    def close(self) -> None:
        for rank in self._ranks:
            rank.close()
        for thread in self._threads:
            thread.shutdown()


class _ThreadAdapters:
    """Loads one rank's part after the other's; at rest, as ranks that are processes have to."""

    def __init__(self, loaders: list[AdapterStore]) -> None:
        self._loaders = loaders
        self.num_slots, self.needs_rest = loaders[0].num_slots, True

    def load(self, adapter: LoRARequest, slot: int) -> bool:
        done = [loader.load(adapter, slot) for loader in self._loaders]
        return all(done)

    def problem(self, adapter: LoRARequest) -> str | None:
        return next((said for loader in self._loaders if (said := loader.problem(adapter)) is not None), None)
