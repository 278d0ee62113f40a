"""The input kernels in Triton. Importing this module needs Triton; `select_kernels` does so only for CUDA.

Integers are never specialised on their value (`do_not_specialize`), so nothing compiles again after warm-up when a size
happens to be 1 or a multiple of 16.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from engine.runner.kernels import InputBuffers, StepSizes

_COPY_BLOCK = 1024
_POST_BLOCK = 256


@triton.jit(do_not_specialize_on_alignment=["table", "writes", "values"])
def apply_staged_writes_kernel(table: tl.tensor, writes: tl.tensor, values: tl.tensor, BLOCK: tl.constexpr) -> None:
    write = writes + tl.program_id(0) * 3
    dst = tl.load(write)
    src = tl.load(write + 1)
    length = tl.load(write + 2)
    offsets = tl.program_id(1).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    mask = offsets < length
    tl.store(table + dst + offsets, tl.load(values + src + offsets, mask=mask), mask=mask)


@triton.jit(
    do_not_specialize=[
        "step_stride",
        "tokens_stride",
        "tables_group_stride",
        "tables_row_stride",
        "slots_group_stride",
        "num_seqs",
        "num_tokens",
        "num_samples",
        "padded_seqs",
        "padded_tokens",
        "block_size",
    ]
)
def prepare_inputs_kernel(
    step: tl.tensor,
    step_stride: tl.tensor,
    tokens: tl.tensor,
    tokens_stride: tl.tensor,
    tables: tl.tensor,
    tables_group_stride: tl.tensor,
    tables_row_stride: tl.tensor,
    input_ids: tl.tensor,
    positions: tl.tensor,
    slots: tl.tensor,
    slots_group_stride: tl.tensor,
    seq_lens: tl.tensor,
    query_start_loc: tl.tensor,
    logits_indices: tl.tensor,
    sample_rows: tl.tensor,
    sample_positions: tl.tensor,
    num_seqs: tl.tensor,
    num_tokens: tl.tensor,
    num_samples: tl.tensor,
    padded_seqs: tl.tensor,
    padded_tokens: tl.tensor,
    block_size: tl.tensor,
    GROUPS: tl.constexpr,
    BLOCK: tl.constexpr,
) -> None:
    # Program i < num_seqs writes all of sequence i; the last program writes every tail.
    seq = tl.program_id(0)
    lanes = tl.arange(0, BLOCK)
    if seq < num_seqs:
        row = tl.load(step + seq).to(tl.int64)
        computed = tl.load(step + step_stride + seq)
        start = tl.load(step + 2 * step_stride + seq)
        end = tl.load(step + 2 * step_stride + seq + 1)
        sample = tl.load(step + 3 * step_stride + seq)
        seq_len = computed + end - start
        tl.store(seq_lens + seq, seq_len)
        tl.store(query_start_loc + seq + 1, end)
        if sample >= 0:
            tl.store(logits_indices + sample, (end - 1).to(tl.int64))
            tl.store(sample_rows + sample, row)
            tl.store(sample_positions + sample, seq_len.to(tl.int64))
        for first in range(0, end - start, BLOCK):
            offsets = first + lanes
            mask = offsets < end - start
            at = (computed + offsets).to(tl.int64)
            token = tl.load(tokens + row * tokens_stride + at, mask=mask, other=0)
            tl.store(input_ids + start + offsets, token.to(tl.int64), mask=mask)
            tl.store(positions + start + offsets, at, mask=mask)
            for group in tl.static_range(GROUPS):
                table = tables + group * tables_group_stride + row * tables_row_stride
                block = tl.load(table + at // block_size, mask=mask, other=0).to(tl.int64)
                slot = block * block_size + at % block_size
                tl.store(slots + group * slots_group_stride + start + offsets, slot, mask=mask)
    else:
        tl.store(query_start_loc, 0)
        for first in range(num_tokens, padded_tokens, BLOCK):
            offsets = first + lanes
            mask = offsets < padded_tokens
            tl.store(input_ids + offsets, tl.zeros([BLOCK], tl.int64), mask=mask)
            tl.store(positions + offsets, tl.zeros([BLOCK], tl.int64), mask=mask)
            for group in tl.static_range(GROUPS):
                tl.store(slots + group * slots_group_stride + offsets, tl.full([BLOCK], -1, tl.int64), mask=mask)
        for first in range(num_seqs, padded_seqs, BLOCK):
            offsets = first + lanes
            mask = offsets < padded_seqs
            tl.store(seq_lens + offsets, tl.zeros([BLOCK], tl.int32), mask=mask)
            tl.store(query_start_loc + offsets + 1, tl.zeros([BLOCK], tl.int32) + num_tokens, mask=mask)
        for first in range(num_samples, padded_seqs, BLOCK):
            offsets = first + lanes
            mask = offsets < padded_seqs
            tl.store(logits_indices + offsets, tl.zeros([BLOCK], tl.int64), mask=mask)
            tl.store(sample_rows + offsets, tl.zeros([BLOCK], tl.int64), mask=mask)
            tl.store(sample_positions + offsets, tl.zeros([BLOCK], tl.int64), mask=mask)


@triton.jit(
    do_not_specialize=[
        "tables_group_stride",
        "tables_row_stride",
        "out_group_stride",
        "out_row_stride",
        "num_seqs",
        "num_columns",
    ]
)
def gather_block_tables_kernel(
    tables: tl.tensor,
    tables_group_stride: tl.tensor,
    tables_row_stride: tl.tensor,
    rows: tl.tensor,
    out: tl.tensor,
    out_group_stride: tl.tensor,
    out_row_stride: tl.tensor,
    num_seqs: tl.tensor,
    num_columns: tl.tensor,
    BLOCK: tl.constexpr,
) -> None:
    seq = tl.program_id(0)
    group = tl.program_id(1).to(tl.int64)
    columns = tl.program_id(2) * BLOCK + tl.arange(0, BLOCK)
    row = tl.load(rows + seq, mask=seq < num_seqs, other=0).to(tl.int64)
    source = tables + group * tables_group_stride + row * tables_row_stride + columns
    blocks = tl.load(source, mask=(columns < num_columns) & (seq < num_seqs), other=0)
    target = out + group * out_group_stride + seq.to(tl.int64) * out_row_stride + columns
    tl.store(target, blocks, mask=columns < num_columns)


@triton.jit(
    do_not_specialize=["tokens_stride", "count"],
    do_not_specialize_on_alignment=["rows", "positions", "token_ids"],
)
def post_update_kernel(
    tokens: tl.tensor,
    tokens_stride: tl.tensor,
    rows: tl.tensor,
    positions: tl.tensor,
    token_ids: tl.tensor,
    count: tl.tensor,
    BLOCK: tl.constexpr,
) -> None:
    index = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    mask = index < count
    row = tl.load(rows + index, mask=mask, other=0)
    position = tl.load(positions + index, mask=mask, other=0)
    token = tl.load(token_ids + index, mask=mask, other=0).to(tl.int32)
    tl.store(tokens + row * tokens_stride + position, token, mask=mask)


class TritonKernels:
    """See `InputKernels`."""

    def apply_staged_writes(
        self, table: torch.Tensor, writes: torch.Tensor, values: torch.Tensor, max_length: int
    ) -> None:
        grid = (len(writes), triton.cdiv(max_length, _COPY_BLOCK))
        apply_staged_writes_kernel[grid](table, writes, values, BLOCK=_COPY_BLOCK)

    def prepare_inputs(
        self,
        step: torch.Tensor,
        tokens: torch.Tensor,
        block_tables: torch.Tensor,
        out: InputBuffers,
        sizes: StepSizes,
        block_size: int,
    ) -> None:
        prepare_inputs_kernel[(sizes.num_seqs + 1,)](
            step,
            step.stride(0),
            tokens,
            tokens.stride(0),
            block_tables,
            block_tables.stride(0),
            block_tables.stride(1),
            out.input_ids,
            out.positions,
            out.slot_mapping,
            out.slot_mapping.stride(0),
            out.seq_lens,
            out.query_start_loc,
            out.logits_indices,
            out.sample_rows,
            out.sample_positions,
            sizes.num_seqs,
            sizes.num_tokens,
            sizes.num_samples,
            sizes.padded_seqs,
            sizes.padded_tokens,
            block_size,
            GROUPS=block_tables.shape[0],
            BLOCK=_COPY_BLOCK,
        )

    def gather_block_tables(
        self, block_tables: torch.Tensor, rows: torch.Tensor, out: torch.Tensor, sizes: StepSizes, num_columns: int
    ) -> None:
        grid = (sizes.padded_seqs, block_tables.shape[0], triton.cdiv(num_columns, _COPY_BLOCK))
        gather_block_tables_kernel[grid](
            block_tables,
            block_tables.stride(0),
            block_tables.stride(1),
            rows,
            out,
            out.stride(0),
            out.stride(1),
            sizes.num_seqs,
            num_columns,
            BLOCK=_COPY_BLOCK,
        )

    def post_update(
        self, tokens: torch.Tensor, rows: torch.Tensor, positions: torch.Tensor, token_ids: torch.Tensor
    ) -> None:
        count = len(token_ids)
        post_update_kernel[(triton.cdiv(count, _POST_BLOCK),)](
            tokens, tokens.stride(0), rows, positions, token_ids, count, BLOCK=_POST_BLOCK
        )
