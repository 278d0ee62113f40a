"""A stage that samples nothing learns what was sampled, whoever has its rows by then."""

from __future__ import annotations

from typing import cast

import pytest
import torch

from engine.errors import EngineError
from engine.parallel.stage_link import StateLink
from engine.runner.batch import StepBatch
from engine.runner.request_table import RequestTable
from engine.runner.stages import PassingOn
from engine.runner.step_sampler import no_masks
from engine.step import RowParams, Rows, ScheduledRow, StepPlan, StepResult

PARAMS = RowParams(seed=0)


class NoLink:
    def send(self, step_id: int, states: torch.Tensor) -> None:
        """Nobody is there."""


class Batch:
    def __init__(self, rows: list[ScheduledRow]) -> None:
        self.rows = Rows.of(rows)


class NoObserver:
    def mark(self, part: str) -> None:
        """Nobody looks."""


class Stage:
    def __init__(self) -> None:
        self.table = RequestTable(4, 32, 4, 1, torch.device("cpu"))
        self.passing_on = PassingOn(cast(StateLink, NoLink()), self.table)

    def step(self, step_id: int, *rows: ScheduledRow, added: tuple[int, ...] = ()) -> None:
        for row in added:
            self.passing_on.add(row, PARAMS, [1], 1)
        batch = cast(StepBatch, Batch(list(rows)))
        step = self.passing_on.run(
            StepPlan(step_id=step_id),
            batch,
            torch.zeros(0, 8),
            NoObserver(),
            no_masks,  # type: ignore[arg-type]
        )
        assert step.sampled is None

    def learn(self, step_id: int, tokens: list[int], counts: list[int] | None = None) -> None:
        self.passing_on.learn(StepResult(step_id=step_id, token_ids=tokens, counts=counts or []))


def test_tokens_go_where_the_last_stage_writes_them() -> None:
    stage = Stage()
    stage.step(0, ScheduledRow(2, 9, 1, 1), ScheduledRow(0, 0, 3, 0), ScheduledRow(1, 4, 2, 1), added=(0, 1, 2))
    stage.learn(0, [50, 60])
    assert stage.table.tokens[2, 10] == 50 and stage.table.tokens[1, 6] == 60
    assert stage.table.lengths.tolist() == [0, 7, 11, 0]


def test_of_drafts_those_that_were_right_count_and_the_token_behind_them() -> None:
    stage = Stage()
    stage.step(0, ScheduledRow(0, 5, 4, 4), ScheduledRow(1, 5, 4, 4), added=(0, 1))
    stage.learn(0, [1, 2, 3, 4], [3, 1])
    assert stage.table.tokens[0, 5:10].tolist() == [0, 1, 2, 3, 0]
    assert stage.table.tokens[1, 5:10].tolist() == [0, 4, 0, 0, 0]
    assert stage.table.lengths.tolist() == [9, 7, 0, 0]


def test_a_row_that_was_given_away_meanwhile_is_left_alone() -> None:
    stage = Stage()
    stage.step(0, ScheduledRow(0, 5, 1, 1), ScheduledRow(1, 5, 1, 1), added=(0, 1))
    stage.step(1, ScheduledRow(0, 0, 2, 1), added=(0,))
    stage.learn(0, [70, 71])
    assert stage.table.tokens[0].sum() == 0 and stage.table.lengths[0] == 0
    assert stage.table.tokens[1, 6] == 71
    stage.learn(1, [72])
    assert stage.table.tokens[0, 2] == 72 and stage.table.lengths[0] == 3


def test_steps_of_which_nothing_is_told_are_passed_over_but_none_is_made_up() -> None:
    stage = Stage()
    stage.step(-3, ScheduledRow(0, 0, 1, 1), added=(0,))
    stage.step(0, ScheduledRow(0, 1, 1, 1))
    stage.learn(0, [9])
    assert stage.table.tokens[0, :4].tolist() == [0, 0, 9, 0]
    with pytest.raises(EngineError, match="tokens of step 0 came"):
        stage.learn(0, [9])
