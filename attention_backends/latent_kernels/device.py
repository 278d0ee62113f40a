"""The kernels over latents in Triton. Importing this module needs Triton.

A sequence's rows are its (query, head) pairs, heads of a query side by side; a program has some rows of one sequence
and a part of their keys (flash attention: Dao et al. 2022; split keys: Dao et al. 2023). Grids come from counts of
tokens and sequences, everything else is read on the device, so launches may be captured. What changes from step to step
is never specialised on.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from attention_backends.interface import AttentionBatch
from attention_backends.latent_kernels import FEW_ROWS, KEYS, ROWS, WARPS

_LOG2_E = 1.4426950408889634
_LEAST_KEYS = 64
"""of a part, where lengths are known"""
_MAX_SPLITS = 64


@triton.jit
def _sequence_of(
    query_start_loc: tl.tensor, num_seqs: tl.tensor, num_heads: tl.tensor, ROWS: tl.constexpr
) -> tl.tensor:
    # The last sequence whose first program is not behind this one; sequence i's is its first row // ROWS + i.
    program = tl.program_id(0)
    low = num_seqs * 0
    high = num_seqs
    while high - low > 1:
        middle = (low + high) // 2
        begins = tl.load(query_start_loc + middle) * num_heads // ROWS + middle
        low = tl.where(begins <= program, middle, low)
        high = tl.where(begins <= program, high, middle)
    return low


@triton.jit
def _keys_of(
    earliest: tl.tensor, latest: tl.tensor, num_splits: tl.tensor, window: tl.tensor, KEYS: tl.constexpr
) -> tuple[tl.tensor, tl.tensor, tl.tensor]:
    # Of queries at positions earliest .. latest the oldest key, and where this program's keys begin and end.
    oldest = tl.where(window > 0, tl.maximum(earliest - window + 1, 0), 0)
    aligned = oldest // KEYS * KEYS
    seen = tl.maximum(latest + 1, 0)
    of_each = tl.cdiv(tl.cdiv(seen - aligned, KEYS), num_splits) * KEYS
    start = aligned + tl.program_id(1) * of_each
    return oldest, start, tl.minimum(start + of_each, seen)


@triton.jit
def _fold(
    q: tl.tensor,
    q_common: tl.tensor,
    at: tl.tensor,
    forgotten: tl.tensor,
    oldest: tl.tensor,
    start: tl.tensor,
    end: tl.tensor,
    cache: tl.tensor,
    table: tl.tensor,
    block_stride: tl.tensor,
    scale: tl.tensor,
    RANK: tl.constexpr,
    COMMON: tl.constexpr,
    PAGE: tl.constexpr,
    KEYS: tl.constexpr,
) -> tuple[tl.tensor, tl.tensor]:
    # What rows find among keys start .. end, and the base-2 logarithms of their sums. Row i sees keys behind
    # forgotten[i] up to at[i]; none are read before `oldest`, where a window has left blocks to others.
    dim = tl.arange(0, q.shape[1])
    common = tl.arange(0, q_common.shape[1])
    largest = tl.full([q.shape[0]], float("-inf"), tl.float32)
    total = tl.zeros([q.shape[0]], tl.float32)
    values = tl.zeros([q.shape[0], q.shape[1]], tl.float32)
    for key in range(start, end, KEYS):
        key_at = key + tl.arange(0, KEYS)
        there = (key_at >= oldest) & (key_at < end)
        block = tl.load(table + key_at // PAGE, mask=there, other=0).to(tl.int64)
        keys = cache + block * block_stride + (key_at % PAGE) * (RANK + COMMON)
        latents = tl.load(keys[:, None] + dim[None, :], mask=there[:, None] & (dim < RANK)[None, :], other=0.0)
        inside = there[None, :] & (common < COMMON)[:, None]
        turned = tl.load(keys[None, :] + RANK + common[:, None], mask=inside, other=0.0)
        scores = tl.dot(q, tl.trans(latents), input_precision="ieee")
        scores = tl.dot(q_common, turned, scores, input_precision="ieee") * scale
        shown = there[None, :] & (key_at[None, :] <= at[:, None]) & (key_at[None, :] > forgotten[:, None])
        scores = tl.where(shown, scores, float("-inf"))
        higher = tl.maximum(largest, tl.max(scores, axis=1))
        base = tl.where(higher == float("-inf"), 0.0, higher)
        weights = tl.exp2(scores - base[:, None])
        shrunk = tl.exp2(largest - base)
        total = total * shrunk + tl.sum(weights, axis=1)
        values = tl.dot(weights.to(latents.dtype), latents, values * shrunk[:, None], input_precision="ieee")
        largest = higher
    none = total == 0.0
    values = values / tl.where(none, 1.0, total)[:, None]
    return values, tl.where(none, float("-inf"), largest + tl.log2(tl.where(none, 1.0, total)))


@triton.jit(
    do_not_specialize=["table_stride", "num_seqs", "num_tokens", "num_heads", "num_splits", "window"],
    do_not_specialize_on_alignment=["query_start_loc", "seq_lens", "block_tables"],
)
def attend_kernel(
    queries: tl.tensor,
    commons: tl.tensor,
    cache: tl.tensor,
    found: tl.tensor,
    partials: tl.tensor,
    sums: tl.tensor,
    query_start_loc: tl.tensor,
    seq_lens: tl.tensor,
    block_tables: tl.tensor,
    table_stride: tl.tensor,
    block_stride: tl.tensor,
    common_token_stride: tl.tensor,
    common_head_stride: tl.tensor,
    num_seqs: tl.tensor,
    num_tokens: tl.tensor,
    num_heads: tl.tensor,
    num_splits: tl.tensor,
    window: tl.tensor,
    scale: tl.tensor,
    RANK: tl.constexpr,
    COMMON: tl.constexpr,
    PADDED_RANK: tl.constexpr,
    PADDED_COMMON: tl.constexpr,
    PAGE: tl.constexpr,
    ROWS: tl.constexpr,
    KEYS: tl.constexpr,
) -> None:
    # `scale` has log2(e) in it. Of several splits each leaves what it found, and the logarithm of its sum.
    seq = _sequence_of(query_start_loc, num_seqs, num_heads, ROWS)
    begin = tl.load(query_start_loc + seq)
    count = tl.load(query_start_loc + seq + 1) - begin
    first = (tl.program_id(0) - begin * num_heads // ROWS - seq) * ROWS
    if first < count * num_heads:
        position = tl.load(seq_lens + seq) - count
        row = first + tl.arange(0, ROWS)
        real = row < count * num_heads
        token = (begin + row // num_heads).to(tl.int64)
        head = row % num_heads
        dim = tl.arange(0, PADDED_RANK)
        common = tl.arange(0, PADDED_COMMON)
        place = head.to(tl.int64) * num_tokens + token
        inside = real[:, None] & (dim < RANK)[None, :]
        q = tl.load(queries + place[:, None] * RANK + dim[None, :], mask=inside, other=0.0)
        source = commons + token[:, None] * common_token_stride + head[:, None] * common_head_stride + common[None, :]
        turned = tl.load(source, mask=real[:, None] & (common < COMMON)[None, :], other=0.0)
        earliest = position + first // num_heads
        latest = position + (tl.minimum(first + ROWS, count * num_heads) - 1) // num_heads
        oldest, start, end = _keys_of(earliest, latest, num_splits, window, KEYS)
        at, table = position + row // num_heads, block_tables + seq.to(tl.int64) * table_stride
        gone = tl.where(window > 0, at - window, -1)
        values, sums_of = _fold(
            q, turned, at, gone, oldest, start, end, cache, table, block_stride, scale, RANK, COMMON, PAGE, KEYS
        )
        if num_splits == 1:
            tl.store(found + place[:, None] * RANK + dim[None, :], values.to(found.dtype.element_ty), mask=inside)
        else:
            place += tl.program_id(1).to(tl.int64) * num_heads * num_tokens
            tl.store(partials + place[:, None] * RANK + dim[None, :], values, mask=inside)
            tl.store(sums + place, sums_of, mask=real)


@triton.jit(do_not_specialize=["rows", "num_splits"])
def merge_kernel(
    partials: tl.tensor,
    sums: tl.tensor,
    found: tl.tensor,
    rows: tl.tensor,
    num_splits: tl.tensor,
    RANK: tl.constexpr,
    PADDED_RANK: tl.constexpr,
) -> None:
    row = tl.program_id(0).to(tl.int64)
    dim = tl.arange(0, PADDED_RANK)
    largest = tl.load(sums + row)
    for split in range(1, num_splits):
        largest = tl.maximum(largest, tl.load(sums + split * rows + row))
    base = tl.where(largest == float("-inf"), 0.0, largest)
    total = 0.0
    values = tl.zeros([PADDED_RANK], tl.float32)
    for split in range(num_splits):
        weight = tl.exp2(tl.load(sums + split * rows + row) - base)
        part = tl.load(partials + (split * rows + row) * RANK + dim, mask=dim < RANK, other=0.0)
        total += weight
        values += part * weight
    values = values / tl.where(total == 0.0, 1.0, total)
    tl.store(found + row * RANK + dim, values.to(found.dtype.element_ty), mask=dim < RANK)


@triton.jit(do_not_specialize_on_alignment=["slots"])
def write_rows_kernel(
    rows: tl.tensor,
    cache: tl.tensor,
    slots: tl.tensor,
    row_stride: tl.tensor,
    block_stride: tl.tensor,
    SIZE: tl.constexpr,
    PADDED_SIZE: tl.constexpr,
    PAGE: tl.constexpr,
) -> None:
    token = tl.program_id(0).to(tl.int64)
    slot = tl.load(slots + token)
    if slot >= 0:
        dim = tl.arange(0, PADDED_SIZE)
        values = tl.load(rows + token * row_stride + dim, mask=dim < SIZE)
        target = cache + (slot // PAGE) * block_stride + (slot % PAGE) * SIZE + dim
        tl.store(target, values, mask=dim < SIZE)


def write_rows(rows: torch.Tensor, cache: torch.Tensor, slots: torch.Tensor, count: int) -> None:
    """Row t of rows [>= count, 1, size] goes to slot slots[t] (int64) of cache [num_blocks, block_size, size], where
    that is not negative."""
    if count:
        size = rows.size(2)
        write_rows_kernel[(count,)](
            rows,
            cache,
            slots,
            rows.stride(0),
            cache.stride(0),
            SIZE=size,
            PADDED_SIZE=triton.next_power_of_2(size),
            PAGE=cache.size(1),
        )


def splits_of(batch: AttentionBatch, num_heads: int, rows: int, programs: int) -> int:
    """Parts of each sequence's keys, so that there are about so many programs. Of a graph lengths are not known."""
    tiles = max(batch.num_seqs, -(-batch.num_tokens * num_heads // rows))
    splits = min(_MAX_SPLITS, max(1, programs // tiles))
    return splits if batch.graph_size is not None else max(1, min(splits, batch.max_seq_len // _LEAST_KEYS))


def attend(
    queries: torch.Tensor,
    commons: torch.Tensor,
    cache: torch.Tensor,
    batch: AttentionBatch,
    scale: float,
    window: int,
    programs: int,
) -> torch.Tensor:
    """What queries find, [heads, tokens, rank], of their dtype: queries [heads, tokens, rank] contiguous, commons
    [tokens, heads, common] the other part of each, cache [num_blocks, block_size, rank + common]. `window` 0: all is
    seen. `programs`: as many fill the device."""
    num_heads, num_tokens, rank = queries.shape
    rows = FEW_ROWS if batch.max_query_len * num_heads <= FEW_ROWS else ROWS
    splits = splits_of(batch, num_heads, rows, programs)
    found = torch.empty_like(queries)
    parts = (splits if splits > 1 else 0, num_heads, num_tokens)
    partials = torch.empty(*parts, rank, dtype=torch.float32, device=queries.device)
    sums = torch.empty(parts, dtype=torch.float32, device=queries.device)
    common, padded = commons.size(2), max(16, triton.next_power_of_2(rank))
    attend_kernel[(num_tokens * num_heads // rows + batch.num_seqs, splits)](
        queries,
        commons,
        cache,
        found,
        partials,
        sums,
        batch.query_start_loc,
        batch.seq_lens,
        batch.block_tables,
        batch.block_tables.stride(0),
        cache.stride(0),
        commons.stride(0),
        commons.stride(1),
        batch.num_seqs,
        num_tokens,
        num_heads,
        splits,
        window,
        scale * _LOG2_E,
        RANK=rank,
        COMMON=common,
        PADDED_RANK=padded,
        PADDED_COMMON=max(16, triton.next_power_of_2(common)),
        PAGE=cache.size(1),
        ROWS=rows,
        KEYS=KEYS[rows],
        num_warps=WARPS,
        num_stages=1,
    )
    if splits > 1:
        merge_kernel[(num_heads * num_tokens,)](
            partials, sums, found, num_heads * num_tokens, splits, RANK=rank, PADDED_RANK=padded
        )
    return found
