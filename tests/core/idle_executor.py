"""A device whose steps compute on two OpenMP threads, as a CPU's do. Apart from the other fakes: it needs torch."""

from __future__ import annotations

import torch
from core_fakes import FakeExecutor

from engine.step import StepPlan, StepResult


class Computing(FakeExecutor):
    step_s = 0.0

    def compute(self, plan: StepPlan) -> StepResult:
        torch.set_num_threads(2)
        torch.mm(torch.ones(512, 512), torch.ones(512, 512))
        return super().compute(plan)
