"""What a plan tells of many rows in columns is what it would tell of each of them."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from engine.row_writes import BlockAppends, RowWrites, TokenRewrites
from engine.runner.kernels.host import HostKernels
from engine.runner.request_table import RequestTable
from engine.runner.staging import StagedWrites
from engine.runner.streams import HostStreams
from engine.step import BlockAppend, RowParams, StepPlan, TokenRewrite

NUM_ROWS, NUM_GROUPS, MAX_MODEL_LEN, BLOCK_SIZE = 5, 2, 30, 4
MAX_BLOCKS = (MAX_MODEL_LEN + BLOCK_SIZE) // BLOCK_SIZE

rows = st.integers(0, NUM_ROWS - 1)
values = st.lists(st.integers(1, 1000), min_size=1, max_size=3)


def writes(columns: int, groups: int) -> st.SearchStrategy[list[tuple[int, int, int, list[int]]]]:
    """(group, row, first column, values)"""
    start = st.integers(0, columns - 3)
    return st.lists(st.tuples(st.integers(0, groups - 1), rows, start, values), max_size=8)


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
    staged = StagedWrites(table.staged_tables(), HostKernels(), HostStreams())
    table.stage(plan, NoSampler(), staged)
    staged.send()
    staged.apply()
    return table.staged_tables()


def columns(found: list[tuple[int, int, int, list[int]]]) -> list[tuple[int, RowWrites]]:
    by_group: dict[int, list[tuple[int, int, list[int]]]] = {}
    for group, row, start, those in found:
        by_group.setdefault(group, []).append((row, start, those))
    return [
        (
            group,
            RowWrites(
                np.array([row for row, _, _ in some]),
                np.array([start for _, start, _ in some]),
                np.array([len(those) for _, _, those in some]),
                np.array([value for _, _, those in some for value in those]),
            ),
        )
        for group, some in by_group.items()
    ]


@settings(deadline=None)
@given(
    appends=st.tuples(writes(MAX_BLOCKS, NUM_GROUPS), writes(MAX_BLOCKS, NUM_GROUPS)),
    rewrites=st.tuples(writes(MAX_MODEL_LEN, 1), writes(MAX_MODEL_LEN, 1)),
)
def test_columns_tell_what_single_writes_do(
    appends: tuple[list[tuple[int, int, int, list[int]]], ...],
    rewrites: tuple[list[tuple[int, int, int, list[int]]], ...],
) -> None:
    single_appends = [BlockAppend(row, group, start, those) for group, row, start, those in appends[0]]
    single_rewrites = [TokenRewrite(row, start, those) for _, row, start, those in rewrites[0]]
    block_appends = BlockAppends(single_appends, columns(appends[1]))
    token_rewrites = TokenRewrites(single_rewrites, columns(rewrites[1]))
    in_columns = StepPlan(step_id=0, rows=[], rewrites=token_rewrites, block_appends=block_appends)
    single = StepPlan(step_id=0, rows=[], rewrites=list(token_rewrites), block_appends=list(block_appends))
    assert len(block_appends) == len(single.block_appends) == len(appends[0]) + len(appends[1])
    assert block_appends[-3:] == single.block_appends[-3:]
    tokens = torch.zeros(NUM_ROWS, MAX_MODEL_LEN + 1, dtype=torch.int32)
    for _, row, start, those in [*rewrites[0], *rewrites[1]]:
        tokens[row, start : start + len(those)] = torch.tensor(those)
    tables = torch.zeros(NUM_GROUPS, NUM_ROWS, MAX_BLOCKS, dtype=torch.int32)
    for group, row, start, those in [*appends[0], *appends[1]]:
        tables[group, row, start : start + len(those)] = torch.tensor(those)
    for plan in (in_columns, single):
        told_tokens, told_tables = told(plan)
        assert torch.equal(told_tokens, tokens)
        assert torch.equal(told_tables.view_as(tables), tables)
