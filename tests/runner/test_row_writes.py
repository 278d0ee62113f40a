"""What a plan writes is what the device's tables hold."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from engine.runner.kernels.host import HostKernels
from engine.runner.request_table import RequestTable
from engine.runner.staging import BufferRing, StagedWrites
from engine.runner.streams import HostStreams
from engine.step import RowParams, StepPlan, Write, Writes

NUM_ROWS, NUM_GROUPS, MAX_MODEL_LEN, BLOCK_SIZE = 5, 2, 30, 4
MAX_BLOCKS = (MAX_MODEL_LEN + BLOCK_SIZE) // BLOCK_SIZE

rows = st.integers(0, NUM_ROWS - 1)
values = st.lists(st.integers(1, 1000), min_size=1, max_size=3)


def writes(columns: int, groups: int) -> st.SearchStrategy[list[Write]]:
    return st.lists(st.builds(Write, st.integers(0, groups - 1), rows, st.integers(0, columns - 3), values), max_size=8)


class NoSampler:
    def add(self, row: int, params: RowParams, token_ids: Sequence[int], prompt_len: int) -> None: ...

    def release(self, row: int) -> None: ...

    def tables(self) -> list[torch.Tensor]:
        return []

    def drain_writes(self) -> list[tuple[int, int, int, list[int]]]:
        return []


def told(plan: StepPlan) -> list[torch.Tensor]:
    """The device's tables after the plan."""
    table = RequestTable(NUM_ROWS, MAX_MODEL_LEN, BLOCK_SIZE, NUM_GROUPS, torch.device("cpu"))
    staged = StagedWrites(table.staged_tables(), HostKernels(), HostStreams(), BufferRing(HostStreams(), 64, 1))
    table.stage(plan, NoSampler(), staged)
    staged.send()
    staged.apply()
    return table.staged_tables()


@settings(deadline=None)
@given(appends=writes(MAX_BLOCKS, NUM_GROUPS), rewrites=writes(MAX_MODEL_LEN, 1))
def test_tables_hold_what_the_plan_writes_and_of_overlapping_writes_the_last(
    appends: list[Write], rewrites: list[Write]
) -> None:
    plan = StepPlan(step_id=0, rewrites=Writes.of(rewrites), block_appends=Writes.of(appends))
    assert plan.block_appends.each() == appends and plan.rewrites.each() == rewrites
    tokens = torch.zeros(NUM_ROWS, MAX_MODEL_LEN + 1, dtype=torch.int32)
    for _, row, start, those in rewrites:
        tokens[row, start : start + len(those)] = torch.tensor(those)
    tables = torch.zeros(NUM_GROUPS, NUM_ROWS, MAX_BLOCKS, dtype=torch.int32)
    for group, row, start, those in appends:
        tables[group, row, start : start + len(those)] = torch.tensor(those)
    told_tokens, told_tables, _ = told(plan)
    assert torch.equal(told_tokens, tokens)
    assert torch.equal(told_tables.view_as(tables), tables)


@pytest.mark.parametrize(
    "write",
    [
        Write(0, -1, 0, [1]),
        Write(0, NUM_ROWS, 0, [1]),  # not another group's row
        Write(NUM_GROUPS, 0, 0, [1]),
        Write(-1, 0, 0, [1]),
        Write(0, 0, -1, [1]),
        Write(0, 0, MAX_BLOCKS, [1]),
        Write(0, 0, 0, [1] * (MAX_BLOCKS + 1)),
    ],
)
def test_writes_outside_a_table_are_refused(write: Write) -> None:
    with pytest.raises(ValueError, match="outside table 1"):
        told(StepPlan(step_id=0, block_appends=Writes.of([Write(1, 1, 1, [1]), write])))
