"""The input kernels in Triton. Importing this module needs Triton; `select_kernels` does so only for CUDA.

Integers are never specialised on their value (`do_not_specialize`), so nothing compiles again after warm-up when a size
happens to be 1 or a multiple of 16.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from engine.runner.kernels import InputBuffers, StepSizes
from engine.runner.kernels.ngram_device import ngram_draft_kernel, ngram_match_kernel

__all__ = [
    "TritonKernels",
    "apply_staged_writes_kernel",
    "gather_block_tables_kernel",
    "ngram_draft_kernel",
    "ngram_match_kernel",
    "post_update_kernel",
    "prepare_inputs_kernel",
]

_COPY_BLOCK = 1024
_POST_BLOCK = 256
_MAX_PARTS = 32
"""a long sequence beside many short ones must not make a grid of its length times their number"""


@triton.jit(do_not_specialize_on_alignment=["table", "writes", "values"])
def apply_staged_writes_kernel(table: tl.tensor, writes: tl.tensor, values: tl.tensor, BLOCK: tl.constexpr) -> None:
    write = writes + tl.program_id(0) * 3
    dst = tl.load(write)
    src = tl.load(write + 1)
    length = tl.load(write + 2)
    for first in range(tl.program_id(1).to(tl.int64) * BLOCK, length, tl.num_programs(1) * BLOCK):
        offsets = first + tl.arange(0, BLOCK)
        mask = offsets < length
        tl.store(table + dst + offsets, tl.load(values + src + offsets, mask=mask), mask=mask)


@triton.jit
def _fill(target: tl.tensor, begin: tl.tensor, end: tl.tensor, value: tl.tensor, BLOCK: tl.constexpr) -> None:
    for first in range(begin, end, BLOCK):
        offsets = first + tl.arange(0, BLOCK)
        filled = tl.zeros([BLOCK], target.dtype.element_ty) + value
        tl.store(target + offsets, filled.to(target.dtype.element_ty), mask=offsets < end)


@triton.jit
def _fill_steps(
    target: tl.tensor, begin: tl.tensor, end: tl.tensor, value: tl.tensor, step: tl.tensor, BLOCK: tl.constexpr
) -> None:
    for first in range(begin, end, BLOCK):
        offsets = first + tl.arange(0, BLOCK)
        tl.store(target + offsets, value + (offsets - begin + 1) * step, mask=offsets < end)


@triton.jit
def _fill_samples(
    indices: tl.tensor, rows: tl.tensor, positions: tl.tensor, begin: tl.tensor, end: tl.tensor, BLOCK: tl.constexpr
) -> None:
    _fill(indices, begin, end, 0, BLOCK)
    _fill(rows, begin, end, 0, BLOCK)
    _fill(positions, begin, end, 0, BLOCK)


@triton.jit
def _store_sample(
    indices: tl.tensor,
    rows: tl.tensor,
    positions: tl.tensor,
    sample: tl.tensor,
    end: tl.tensor,
    row: tl.tensor,
    seq_len: tl.tensor,
) -> None:
    if sample >= 0:
        tl.store(indices + sample, (end - 1).to(tl.int64))
        tl.store(rows + sample, row)
        tl.store(positions + sample, seq_len.to(tl.int64))


@triton.jit
def _place(said: tl.tensor, length: tl.tensor) -> tl.tensor:
    place = tl.load(said)
    return tl.where(place < 0, tl.load(length) - 1 + ~place, place)


@triton.jit
def _write_slots(
    target: tl.tensor, table: tl.tensor, positions: tl.tensor, mask: tl.tensor, block_size: tl.tensor
) -> None:
    block = tl.load(table + positions // block_size, mask=mask, other=0).to(tl.int64)
    tl.store(target, block * block_size + positions % block_size, mask=mask)


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
        "padded_query_len",
        "block_size",
    ]
)
def prepare_inputs_kernel(
    step: tl.tensor,
    step_stride: tl.tensor,
    tokens: tl.tensor,
    tokens_stride: tl.tensor,
    lengths: tl.tensor,
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
    padded_query_len: tl.tensor,
    block_size: tl.tensor,
    GROUPS: tl.constexpr,
    BLOCK: tl.constexpr,
) -> None:
    # Programs (i < num_seqs, part) write sequence i, the first of them what there is once; (num_seqs, 0) every tail.
    seq, part = tl.program_id(0), tl.program_id(1)
    if seq < num_seqs:
        row = tl.load(step + seq).to(tl.int64)
        computed = _place(step + step_stride + seq, lengths + row)
        start = tl.load(step + 2 * step_stride + seq)
        end = tl.load(step + 2 * step_stride + seq + 1)
        seq_len = computed + end - start
        if part == 0:
            sample = tl.load(step + 3 * step_stride + seq)
            tl.store(seq_lens + seq, seq_len)
            tl.store(query_start_loc + seq + 1, end)
            _store_sample(logits_indices, sample_rows, sample_positions, sample, end, row, seq_len)
        for first in range(part * BLOCK, end - start, tl.num_programs(1) * BLOCK):
            offsets = first + tl.arange(0, BLOCK)
            mask = offsets < end - start
            at = (computed + offsets).to(tl.int64)
            token = tl.load(tokens + row * tokens_stride + at, mask=mask, other=0)
            tl.store(input_ids + start + offsets, token.to(tl.int64), mask=mask)
            tl.store(positions + start + offsets, at, mask=mask)
            for group in tl.static_range(GROUPS):
                table = tables + group * tables_group_stride + row * tables_row_stride
                _write_slots(slots + group * slots_group_stride + start + offsets, table, at, mask, block_size)
    elif part == 0:
        tl.store(query_start_loc, 0)
        for group in tl.static_range(GROUPS):
            _fill(slots + group * slots_group_stride, num_tokens, padded_tokens, -1, BLOCK)
        _fill(input_ids, num_tokens, padded_tokens, 0, BLOCK)
        _fill(positions, num_tokens, padded_tokens, 0, BLOCK)
        _fill(seq_lens, num_seqs, padded_seqs, 0, BLOCK)
        _fill_steps(query_start_loc + 1, num_seqs, padded_seqs, num_tokens, padded_query_len, BLOCK)
        _fill_samples(logits_indices, sample_rows, sample_positions, num_samples, padded_seqs, BLOCK)


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
    do_not_specialize_on_alignment=["rows", "positions", "token_ids", "known"],
)
def post_update_kernel(
    tokens: tl.tensor,
    tokens_stride: tl.tensor,
    lengths: tl.tensor,
    rows: tl.tensor,
    positions: tl.tensor,
    token_ids: tl.tensor,
    known: tl.tensor,
    count: tl.tensor,
    DRAFTS: tl.constexpr,
    BLOCK: tl.constexpr,
) -> None:
    # Of a row with drafts several programs may write the same length.
    index = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    mask = index < count
    row = tl.load(rows + index, mask=mask, other=0)
    position = tl.load(positions + index, mask=mask, other=0)
    token = tl.load(token_ids + index, mask=mask, other=0).to(tl.int32)
    tl.store(tokens + row * tokens_stride + position, token, mask=mask)
    length = position + 1
    if DRAFTS:
        length = tl.load(known + index, mask=mask, other=0)
    tl.store(lengths + row, length.to(tl.int32), mask=mask)


class TritonKernels:
    """See `InputKernels`. `block`: elements that a program handles at a time, a power of two; `parts`: programs that
    share one sequence or one write at most. Tests take small ones."""

    def __init__(self, block: int = _COPY_BLOCK, parts: int = _MAX_PARTS) -> None:
        self._block, self._parts = block, parts

    def apply_staged_writes(
        self, table: torch.Tensor, writes: torch.Tensor, values: torch.Tensor, max_length: int
    ) -> None:
        grid = (len(writes), self._parts_of(max_length))
        apply_staged_writes_kernel[grid](table, writes, values, BLOCK=self._block)

    def prepare_inputs(
        self,
        step: torch.Tensor,
        tokens: torch.Tensor,
        lengths: torch.Tensor,
        block_tables: torch.Tensor,
        out: InputBuffers,
        sizes: StepSizes,
        block_size: int,
    ) -> None:
        prepare_inputs_kernel[(sizes.num_seqs + 1, self._parts_of(sizes.max_query_len))](
            step,
            step.stride(0),
            tokens,
            tokens.stride(0),
            lengths,
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
            sizes.padded_query_len,
            block_size,
            GROUPS=block_tables.shape[0],
            BLOCK=self._block,
        )

    def gather_block_tables(
        self, block_tables: torch.Tensor, rows: torch.Tensor, out: torch.Tensor, sizes: StepSizes, num_columns: int
    ) -> None:
        grid = (sizes.padded_seqs, block_tables.shape[0], triton.cdiv(num_columns, self._block))
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
            BLOCK=self._block,
        )

    def post_update(
        self,
        tokens: torch.Tensor,
        lengths: torch.Tensor,
        rows: torch.Tensor,
        positions: torch.Tensor,
        token_ids: torch.Tensor,
        known: torch.Tensor | None = None,
    ) -> None:
        count, drafts = len(token_ids), int(known is not None)
        post_update_kernel[(triton.cdiv(count, _POST_BLOCK),)](
            tokens,
            tokens.stride(0),
            lengths,
            rows,
            positions,
            token_ids,
            positions if known is None else known,
            count,
            DRAFTS=drafts,
            BLOCK=_POST_BLOCK,
        )

    def _parts_of(self, length: int) -> int:
        # An empty grid runs nothing, and says nothing: there is always a first part, which writes what there is once.
        return max(1, min(-(-length // self._block), self._parts))
