"""What ranks that compute one model do alike."""

from __future__ import annotations

from collections.abc import Callable

import torch

from compilation.interface import CompiledModel
from engine.errors import EngineError
from engine.parallel.group import Group
from engine.step import StepPlan


def compiled_by_all(compile: Callable[[], CompiledModel], group: Group | None, device: torch.device) -> CompiledModel:
    """Raises where this rank could not compile, or another one, so that all run pieces or none does: where they
    rounded differently, routers could choose different experts."""
    if group is None:
        return compile()
    failed: Exception | None = None
    try:
        compiled = compile()
    except Exception as error:
        failed = error
    failures = _count(failed is not None, group, device)
    if failed is not None:
        raise failed
    if failures:
        raise EngineError(f"{failures} of the other ranks could not compile")
    return compiled


def true_in_all(group: Group | None, device: torch.device) -> Callable[[bool], bool] | None:
    """Which all ranks call, and learn whether it is true in each; None: there is only one."""
    return None if group is None else lambda mine: _count(mine, group, device) == group.size


def end_moves_together(plan: StepPlan, all_ranks: Callable[[bool], bool] | None) -> None:
    """Of a step without rows; the others end together, by their collectives. Who waits for the result may then write to
    host blocks that the step has read, in the memory of every rank."""
    if all_ranks is not None and (plan.swap_out or plan.swap_in):
        all_ranks(True)


def _count(mine: bool, group: Group, device: torch.device) -> int:
    """Of how many ranks it is true."""
    counted = group.all_reduce(torch.full((1, 1), float(mine), device=device), None, torch.float32, group.name)
    return int(counted.item())
