"""Compiled pieces are run by all ranks or by none."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
import torch

sys.path.append(str(Path(__file__).parents[1] / "parallel"))
from thread_group import ThreadGroup, in_ranks

from compilation.interface import CompiledModel, CompileReport
from engine.errors import EngineError
from engine.runner.ranks import compiled_by_all, end_moves_together
from engine.step import StepPlan

CPU = torch.device("cpu")
MADE = CompiledModel(run=lambda *inputs: inputs[0], report=CompileReport(0, 0, 0, 0, 0.0))


def test_all_ranks_have_pieces_where_all_could_compile() -> None:
    assert compiled_by_all(lambda: MADE, None, CPU) is MADE
    assert in_ranks(3, lambda group: compiled_by_all(lambda: MADE, group, CPU)) == [MADE] * 3


def test_no_rank_has_pieces_where_one_could_not_compile() -> None:
    def work(group: ThreadGroup) -> str:
        def compile() -> CompiledModel:
            if group.rank == 1:
                raise RuntimeError("no compiler here")
            return MADE

        with pytest.raises((RuntimeError, EngineError)) as caught:
            compiled_by_all(compile, group, CPU)
        return str(caught.value)

    told = in_ranks(3, work)
    assert told == [
        "1 of the other ranks could not compile",
        "no compiler here",
        "1 of the other ranks could not compile",
    ]


def test_a_step_that_moves_blocks_alone_ends_in_all_ranks() -> None:
    asked: list[bool] = []

    def all_ranks(mine: bool) -> bool:
        asked.append(mine)
        return True

    end_moves_together(StepPlan(step_id=0), all_ranks)
    end_moves_together(StepPlan(step_id=1, swap_in=[(0, 1)]), None)
    assert asked == [], "nothing is moved, or there is nobody else"
    end_moves_together(StepPlan(step_id=2, swap_in=[(0, 1)]), all_ranks)
    end_moves_together(StepPlan(step_id=3, swap_out=[(0, 1)]), all_ranks)
    assert asked == [True, True]
