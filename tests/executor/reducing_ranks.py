"""Ranks that really compute together: executors as they serve, over a runner whose steps are one all-reduce each."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path

import torch

from compilation.behind import CompileJob
from engine.config import EngineConfig
from engine.executor.in_process import InProcessExecutor
from engine.executor.rank_executor import executor_of
from engine.observability.step_profile import PartTimes
from engine.parallel.shared_memory import SharedGroup
from engine.reports import LoadReport, WarmUpReport
from engine.step import StepMasks, StepPlan, StepResult


class Late:
    """A result that comes a little behind the step, as a GPU's do."""

    at_hand = False

    def __init__(self, step_id: int, token: int) -> None:
        self._result = StepResult(step_id=step_id, token_ids=[token])

    def wait(self) -> StepResult:
        time.sleep(0.001)
        return self._result


class Reducing:
    part_times = PartTimes()
    report = LoadReport(
        weight_bytes=1,
        activation_bytes=2,
        workspace_bytes=3,
        block_bytes=4,
        device_bytes_total=5,
        device_bytes_free=6,
        attention_backend="fake",
    )

    def __init__(self, config: EngineConfig, group: SharedGroup) -> None:
        self._group = group
        self._notes = Path(config.model.path, f"rank-{group.rank}")

    def allocate(self, num_blocks: int, num_host_blocks: int = 0) -> None:
        """There is no cache."""

    def warm_up(self) -> WarmUpReport:
        self._sum(0)
        return WarmUpReport()

    def compile_job(self) -> CompileJob | None:
        return None

    def idle_work(self) -> bool:
        return False

    def compiles_after_ready(self) -> int:
        return 0

    def execute(self, plan: StepPlan, masks: Callable[[], StepMasks] | None = None) -> Late:
        """The token is the sum over ranks of (step + rank), and of all masks' bits."""
        token = self._sum(plan.step_id + self._group.rank)
        if plan.masked and masks is not None:
            token += self._sum(int(masks().bits.sum()))
        with open(self._notes, "a") as notes:
            notes.write(f"{plan.step_id} {token}\n")
        return Late(plan.step_id, token)

    def _sum(self, value: int) -> int:
        mine = torch.full((2, 16), float(value))
        return int(self._group.all_reduce(mine, None, torch.float32, self._group.name)[1, 3])


def reducing(
    config: EngineConfig, group: SharedGroup, receive_masks: Callable[[], StepMasks] | None
) -> InProcessExecutor:
    return executor_of(config, lambda config: Reducing(config, group), receive_masks)
