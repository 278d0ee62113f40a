"""Executors around the clock: one that only says how long a step would take, and one that notes how long it took."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable

from engine.executor.interface import CompileState, Executor
from engine.executor.team import Team
from engine.reports import LoadReport, WarmUpReport
from engine.step import StepMasks, StepPlan, StepResult
from entrypoints.bench.cluster.costs import StepCosts, StepWork
from entrypoints.bench.cluster.neighbours import Neighbours
from entrypoints.bench.cluster.stages import Stages

TOKEN = 7
"""what is always sampled"""


class VirtualExecutor:
    """Computes nothing: its clock goes on by what steps cost."""

    def __init__(
        self,
        costs: StepCosts,
        stages: Stages = Stages(),  # noqa: B008  # it is frozen
        neighbours: Neighbours | None = None,
    ) -> None:
        """`neighbours`: None: each stage has a machine of its own."""
        self._neighbours = neighbours or Neighbours()
        self.now = 0.0
        """of its clock, seconds; who drives it moves it on where there was nothing to do"""
        self._costs, self._stages = costs, stages
        self._steps: deque[tuple[StepPlan, float]] = deque()
        self._free_at = [0.0] * len(stages.shares)
        """each stage"""

    def load(self) -> LoadReport:
        return self._stages.report(self._costs.report)

    def allocate(self, num_blocks: int, num_host_blocks: int = 0) -> None:
        """There is room."""

    def warm_up(self) -> WarmUpReport:
        return WarmUpReport(swap_block_s=self._costs.swap_block_s)

    def compile_state(self) -> CompileState:
        return "done"

    def watch_compilation(self, changed: Callable[[], None]) -> None:
        changed()

    def submit(self, plan: StepPlan, done: Callable[[], None]) -> None:
        end = self.now + (len(plan.swap_in) + len(plan.swap_out)) * self._costs.swap_block_s / 2
        for index, seconds in enumerate(self._stages.seconds(self._costs, StepWork.of(plan.rows))):
            arrived = end + self._stages.hop_s * (index > 0)
            begin = max(arrived, self._free_at[index])
            end = self._free_at[index] = begin + self._neighbours.begin((id(self), index), begin, seconds)
        self._steps.append((plan, end + self._stages.hop_s))
        done()

    def sample(self, masks: StepMasks) -> None:
        """Every token is `TOKEN`."""

    def collect(self) -> StepResult:
        plan, end = self._steps.popleft()
        self.now = max(self.now, end)
        return StepResult(step_id=plan.step_id, token_ids=[TOKEN] * int(plan.rows.samples.sum()))

    def compiles_after_ready(self) -> int:
        return 0

    def part_seconds(self) -> dict[str, float]:
        return {}

    def team(self) -> Team | None:
        return None

    def close(self) -> None:
        """Nothing is held."""


class NotingExecutor:
    """What another one does, and how long each of its steps took, planning and completing included."""

    def __init__(self, executor: Executor, longest_gap_s: float = 0.02) -> None:
        """`longest_gap_s`: between two steps; what is longer, nobody had anything to do."""
        self._executor = executor
        self._longest_gap_s = longest_gap_s
        self._plans: deque[tuple[StepWork, float]] = deque()
        self._ended = 0.0
        self.works: list[StepWork] = []
        self.seconds: list[float] = []

    def load(self) -> LoadReport:
        self.report = self._executor.load()
        return self.report

    def allocate(self, num_blocks: int, num_host_blocks: int = 0) -> None:
        self._executor.allocate(num_blocks, num_host_blocks)

    def warm_up(self) -> WarmUpReport:
        report = self._executor.warm_up()
        self.swap_block_s = report.swap_block_s
        return report

    def compile_state(self) -> CompileState:
        return self._executor.compile_state()

    def watch_compilation(self, changed: Callable[[], None]) -> None:
        self._executor.watch_compilation(changed)

    def submit(self, plan: StepPlan, done: Callable[[], None]) -> None:
        self._plans.append((StepWork.of(plan.rows), time.perf_counter()))
        self._executor.submit(plan, done)

    def sample(self, masks: StepMasks) -> None:
        self._executor.sample(masks)

    def collect(self) -> StepResult:
        result = self._executor.collect()
        now, (work, submitted) = time.perf_counter(), self._plans.popleft()
        began = self._ended if submitted - self._ended < self._longest_gap_s else submitted
        self.works.append(work)
        self.seconds.append(now - began)
        self._ended = now
        return result

    def compiles_after_ready(self) -> int:
        return self._executor.compiles_after_ready()

    def part_seconds(self) -> dict[str, float]:
        return self._executor.part_seconds()

    def team(self) -> Team | None:
        return self._executor.team()

    def close(self) -> None:
        self._executor.close()
