"""The short way for plain decode steps builds what the general one builds."""

from __future__ import annotations

import dataclasses

import torch
from hypothesis import given
from hypothesis import strategies as st

from engine.runner.kernels import InputBuffers, StepSizes
from engine.runner.kernels.host import HostKernels

ROWS, COLUMNS, BLOCKS, BLOCK_SIZE, GROUPS = 6, 40, 10, 4, 2


def _buffers() -> InputBuffers:
    def int64(*shape: int) -> torch.Tensor:
        return torch.full(shape, -7, dtype=torch.int64)

    return InputBuffers(
        input_ids=int64(ROWS),
        positions=int64(ROWS),
        slot_mapping=int64(GROUPS, ROWS),
        seq_lens=torch.full((ROWS,), -7, dtype=torch.int32),
        query_start_loc=torch.full((ROWS + 1,), -7, dtype=torch.int32),
        logits_indices=int64(ROWS),
        sample_rows=int64(ROWS),
        sample_positions=int64(ROWS),
        block_tables=torch.full((GROUPS, ROWS, BLOCKS), -7, dtype=torch.int32),
    )


@given(st.lists(st.tuples(st.permutations(range(ROWS)), st.integers(1, ROWS), st.randoms()), min_size=1, max_size=4))
def test_plain_decode_steps_equal_the_general_way(steps: list[tuple[list[int], int, object]]) -> None:
    """Several steps on the same buffers: what one leaves behind must not show in the next."""
    torch.manual_seed(0)
    tokens = torch.randint(0, 1000, (ROWS, COLUMNS), dtype=torch.int32)
    tables = torch.randint(0, 500, (GROUPS, ROWS, BLOCKS), dtype=torch.int32)
    kernels, short, general = HostKernels(), _buffers(), _buffers()
    lengths = torch.ones(ROWS, dtype=torch.int32)
    for rows, n, rng in steps:
        step = torch.zeros(4, ROWS + 1, dtype=torch.int32)
        step[0, :n] = torch.tensor(rows[:n])
        step[1, :n] = torch.tensor([rng.randrange(COLUMNS) for _ in range(n)])  # type: ignore[attr-defined]
        step[2:, : n + 1] = torch.arange(n + 1, dtype=torch.int32)
        sizes = StepSizes(n, n, n, n, n, 1, one_token_each=True)
        kernels.prepare_inputs(step, tokens, lengths, tables, short, sizes, BLOCK_SIZE)
        HostKernels()._prepare_any(step, tokens, tables, general, sizes, BLOCK_SIZE)
        for field in dataclasses.fields(InputBuffers):
            a, b = getattr(short, field.name), getattr(general, field.name)
            width = n + 1 if field.name == "query_start_loc" else n
            if field.name != "block_tables":
                assert torch.equal(a[..., :width], b[..., :width]), field.name
