"""B (A x) of each row's adapter in Triton. Importing this module needs Triton.

One program per row and block; a row without an adapter costs a program that loads one number. A row's sums run in one
order whatever its batch is, and nothing is read on the host, so launches may be captured.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import triton
import triton.language as tl

_BLOCK_INPUTS, _BLOCK_RANK, _BLOCK_OUTPUTS = 256, 16, 128
_NARROW = 16


@triton.jit(do_not_specialize=["most_rank", "inputs", "parts"])
def shrink_kernel(
    x: tl.tensor,
    slots: tl.tensor,
    a: tl.tensor,
    ranks: tl.tensor,
    low: tl.tensor,
    most_rank: tl.tensor,
    inputs: tl.tensor,
    parts: tl.tensor,
    BLOCK_RANK: tl.constexpr,
    BLOCK_INPUTS: tl.constexpr,
) -> None:
    # low [rows, parts, most_rank] = A x, float32; grid (rows, parts, blocks of the rank).
    row, part = tl.program_id(0), tl.program_id(1)
    slot = tl.load(slots + row)
    if slot >= 0:
        rank = tl.load(ranks + slot * parts + part)
        if tl.program_id(2) * BLOCK_RANK < rank:
            lines = tl.program_id(2) * BLOCK_RANK + tl.arange(0, BLOCK_RANK)
            inside = lines < rank
            factors = a + ((slot.to(tl.int64) * parts + part) * most_rank + lines)[:, None] * inputs
            given = x + row.to(tl.int64) * inputs
            sums = tl.zeros([BLOCK_RANK, BLOCK_INPUTS], tl.float32)
            for first in range(0, inputs, BLOCK_INPUTS):
                at = first + tl.arange(0, BLOCK_INPUTS)
                mask = at < inputs
                v = tl.load(given + at, mask=mask, other=0.0).to(tl.float32)
                w = tl.load(factors + at[None, :], mask=inside[:, None] & mask[None, :], other=0.0)
                sums += w.to(tl.float32) * v[None, :]
            target = low + (row.to(tl.int64) * parts + part) * most_rank + lines
            tl.store(target, tl.sum(sums, axis=1), mask=inside)


@triton.jit(do_not_specialize=["most_rank", "outputs", "parts", "part", "begin", "end"])
def expand_kernel(
    y: tl.tensor,
    slots: tl.tensor,
    b: tl.tensor,
    ranks: tl.tensor,
    low: tl.tensor,
    most_rank: tl.tensor,
    outputs: tl.tensor,
    parts: tl.tensor,
    part: tl.tensor,
    begin: tl.tensor,
    end: tl.tensor,
    BLOCK_RANK: tl.constexpr,
    BLOCK_OUTPUTS: tl.constexpr,
) -> None:
    # y [rows, outputs] += B low for outputs begin to end, of one part; grid (rows, blocks of these outputs).
    row = tl.program_id(0)
    slot = tl.load(slots + row)
    if slot >= 0:
        rank = tl.load(ranks + slot * parts + part)
        if rank > 0:
            columns = begin + tl.program_id(1) * BLOCK_OUTPUTS + tl.arange(0, BLOCK_OUTPUTS)
            inside = columns < end
            factors = b + slot.to(tl.int64) * most_rank * outputs + columns[None, :]
            narrow = low + (row.to(tl.int64) * parts + part) * most_rank
            target = y + row.to(tl.int64) * outputs + columns
            sums = tl.load(target, mask=inside, other=0.0).to(tl.float32)
            for first in range(0, rank, BLOCK_RANK):
                lines = first + tl.arange(0, BLOCK_RANK)
                v = tl.load(narrow + lines, mask=lines < rank, other=0.0)
                w = tl.load(
                    factors + lines.to(tl.int64)[:, None] * outputs,
                    mask=(lines < rank)[:, None] & inside[None, :],
                    other=0.0,
                )
                sums += tl.sum(w.to(tl.float32) * v[:, None], axis=0)
            tl.store(target, sums.to(y.dtype.element_ty), mask=inside)


def add_on_device(
    y: torch.Tensor,
    x: torch.Tensor,
    step: torch.Tensor,
    a: torch.Tensor,
    b: torch.Tensor,
    ranks: torch.Tensor,
    ends: Sequence[int],
) -> None:
    """See `engine.adapters.linear.add_adapters`. Only the slots of `step` are read; y is contiguous."""
    rows, (_, parts, most, inputs) = len(y), a.shape
    if not rows:
        return
    x, slots, start = x.contiguous(), step[1:], 0
    low = torch.empty(rows, parts, most, dtype=torch.float32, device=y.device)
    shrink_kernel[(rows, parts, triton.cdiv(most, _BLOCK_RANK))](
        x, slots, a, ranks, low, most, inputs, parts, BLOCK_RANK=_BLOCK_RANK, BLOCK_INPUTS=_BLOCK_INPUTS
    )
    for part, end in enumerate(ends):
        expand_kernel[(rows, triton.cdiv(end - start, _BLOCK_OUTPUTS))](
            y,
            slots,
            b,
            ranks,
            low,
            most,
            y.size(1),
            parts,
            part,
            start,
            end,
            BLOCK_RANK=_NARROW,
            BLOCK_OUTPUTS=_BLOCK_OUTPUTS,
        )
        start = end
