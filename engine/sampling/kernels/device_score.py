"""Penalties over a row's distinct tokens, and log-probabilities: log-sum-exp, rank and alternatives in one pass."""

from __future__ import annotations

import triton
import triton.language as tl

from engine.sampling import columns
from engine.sampling.kernels.device_math import ID_MASK, NUM_FLOATS, NUM_INTS, key_logit, order_key

_REPETITION = tl.constexpr(columns.REPETITION)
_PRESENCE = tl.constexpr(columns.PRESENCE)
_FREQUENCY = tl.constexpr(columns.FREQUENCY)
_SLOT = tl.constexpr(columns.SLOT)
_NONE = tl.constexpr(-(1 << 63))


@triton.jit
def _penalised(
    values: tl.tensor, counts: tl.tensor, repetition: tl.tensor, presence: tl.tensor, frequency: tl.tensor
) -> tl.tensor:
    lowered = tl.div_rn(values, tl.zeros_like(values) + repetition)
    values = tl.where(values > 0.0, lowered, values * repetition)
    return values - frequency * counts.to(tl.float32) - presence * (counts > 0).to(tl.float32)


@triton.jit
def _count_and_lower(
    logits: tl.tensor,
    seen: tl.tensor,
    counts: tl.tensor,
    size: tl.tensor,
    capacity: tl.tensor,
    last: tl.tensor,
    new: tl.tensor,
    lowers: tl.tensor,
    repetition: tl.tensor,
    presence: tl.tensor,
    frequency: tl.tensor,
    BLOCK: tl.constexpr,
) -> tl.tensor:
    # Counts `last` where it is `new`, applies the list to `logits` where that is asked; the list's size afterwards.
    known = tl.zeros([], tl.int32)
    for start in range(0, size, BLOCK):
        offsets = start + tl.arange(0, BLOCK)
        mask = offsets < size
        ids = tl.load(seen + offsets, mask=mask, other=0)
        count = tl.load(counts + offsets, mask=mask, other=0)
        again = mask & new & (ids == last)
        count += again.to(tl.int32)
        tl.store(counts + offsets, count, mask=again)
        known += tl.sum(again.to(tl.int32), axis=0)
        values = tl.load(logits + ids, mask=mask & lowers, other=0.0)
        tl.store(logits + ids, _penalised(values, count, repetition, presence, frequency), mask=mask & lowers)
    appended = new & (known == 0) & (size < capacity)
    if appended:
        tl.store(seen + size, last)
        tl.store(counts + size, 1)
        value = tl.load(logits + last, mask=lowers, other=0.0)
        tl.debug_barrier()
        tl.store(logits + last, _penalised(value, known + 1, repetition, presence, frequency), mask=lowers)
    tl.debug_barrier()  # the next pass reads what any warp wrote
    return size + appended.to(tl.int32)


@triton.jit(
    do_not_specialize=["count", "tokens_stride", "capacity"],
    do_not_specialize_on_alignment=["logits", "rows", "positions"],
)
def penalise_kernel(
    logits: tl.tensor,
    rows: tl.tensor,
    positions: tl.tensor,
    count: tl.tensor,
    tokens: tl.tensor,
    tokens_stride: tl.tensor,
    floats: tl.tensor,
    ints: tl.tensor,
    seen: tl.tensor,
    counts: tl.tensor,
    sizes: tl.tensor,
    counted: tl.tensor,
    capacity: tl.tensor,
    VOCAB: tl.constexpr,
    BLOCK: tl.constexpr,
) -> None:
    # The program where a row comes first owns the row's list and all its positions. It goes through the history from
    # what is counted on: up to the first position it only counts, then it applies the list at each. Drafts are taken
    # back at the end.
    place = tl.program_id(0).to(tl.int64)
    row = tl.load(rows + place)
    slot = tl.load(ints + row * NUM_INTS + _SLOT)
    before = tl.load(rows + place - 1, mask=place > 0, other=-1)
    if (slot >= 0) & (before != row):
        end = place + 1
        while tl.load(rows + end, mask=end < count, other=-1) == row:
            end += 1
        position = tl.load(positions + place)
        behind = position + end - place
        done = tl.load(counted + slot)
        certain = tl.maximum(done, position)
        size = tl.load(sizes + slot).to(tl.int32)
        kept = size
        tokens += row * tokens_stride
        seen += slot * capacity
        counts += slot * capacity
        factors = floats + row * NUM_FLOATS
        repetition = tl.load(factors + _REPETITION)
        presence = tl.load(factors + _PRESENCE)
        frequency = tl.load(factors + _FREQUENCY)
        for at in range(tl.minimum(done + 1, position), behind):
            last = tl.load(tokens + tl.maximum(at - 1, 0))
            new = (at > done) & (last >= 0) & (last < VOCAB)
            target = logits + (place + at - position) * VOCAB
            size = _count_and_lower(
                target, seen, counts, size, capacity, last, new, at >= position,
                repetition, presence, frequency, BLOCK,
            )  # fmt: skip
            kept = tl.where(at <= certain, size, kept)
        for start in range(0, tl.where(behind > certain + 1, kept, 0), BLOCK):
            offsets = start + tl.arange(0, BLOCK)
            mask = offsets < kept
            ids = tl.load(seen + offsets, mask=mask, other=0)
            number = tl.load(counts + offsets, mask=mask, other=0)
            for at in range(certain, behind - 1):
                number -= (ids == tl.load(tokens + at)).to(tl.int32)
            tl.store(counts + offsets, number, mask=mask)
        tl.store(sizes + slot, kept.to(tl.int64))
        tl.store(counted + slot, certain)


@triton.jit(do_not_specialize=["columns"], do_not_specialize_on_alignment=["targets"])
def score_chunks_kernel(
    logits: tl.tensor,
    targets: tl.tensor,
    maxima: tl.tensor,
    sums: tl.tensor,
    greater: tl.tensor,
    candidates: tl.tensor,
    columns: tl.tensor,
    VOCAB: tl.constexpr,
    CHUNK: tl.constexpr,
    CHUNKS: tl.constexpr,
) -> None:
    # Program (row, chunk): maximum, sum of exponentials, tokens above the target, the first `columns` in order.
    row = tl.program_id(0).to(tl.int64)
    chunk = tl.program_id(1)
    logits += row * VOCAB
    at = row * CHUNKS + chunk
    target = tl.load(logits + tl.load(targets + row))
    ids = chunk * CHUNK + tl.arange(0, CHUNK)
    values = tl.load(logits + ids, mask=ids < VOCAB, other=float("-inf"))
    largest = tl.max(values, axis=0)
    base = tl.where(largest > float("-inf"), largest, 0.0)
    tl.store(maxima + at, base)
    tl.store(sums + at, tl.sum(tl.exp(values - base), axis=0))
    tl.store(greater + at, tl.sum((values > target).to(tl.int32), axis=0))
    packed = (order_key(values).to(tl.int64) << 32) | (ids ^ ID_MASK)
    packed = tl.where(ids < VOCAB, packed, _NONE)
    for column in range(columns):
        best = tl.max(packed, axis=0)
        tl.store(candidates + at * columns + column, best)
        packed = tl.where(packed == best, _NONE, packed)


@triton.jit(do_not_specialize=["columns"], do_not_specialize_on_alignment=["targets"])
def score_finish_kernel(
    logits: tl.tensor,
    targets: tl.tensor,
    maxima: tl.tensor,
    sums: tl.tensor,
    greater: tl.tensor,
    candidates: tl.tensor,
    ids: tl.tensor,
    logprobs: tl.tensor,
    ranks: tl.tensor,
    totals: tl.tensor,
    columns: tl.tensor,
    VOCAB: tl.constexpr,
    CHUNKS: tl.constexpr,
    PADDED: tl.constexpr,
    FLAT: tl.constexpr,
) -> None:
    # Program row: ids[row] = (target, first `columns` in order), their log-probabilities, the target's rank.
    row = tl.program_id(0).to(tl.int64)
    chunk = tl.arange(0, PADDED)
    mask = chunk < CHUNKS
    bases = tl.load(maxima + row * CHUNKS + chunk, mask=mask, other=float("-inf"))
    base = tl.max(bases, axis=0)
    shares = tl.load(sums + row * CHUNKS + chunk, mask=mask, other=0.0) * tl.exp(bases - base)
    total = base + tl.log(tl.sum(shares, axis=0))
    above = tl.load(greater + row * CHUNKS + chunk, mask=mask, other=0)
    target = tl.load(targets + row)
    tl.store(totals + row, total)
    tl.store(ranks + row, tl.sum(above, axis=0).to(tl.int64) + 1)
    out = row * (columns + 1)
    tl.store(ids + out, target)
    tl.store(logprobs + out, tl.load(logits + row * VOCAB + target) - total)
    offsets = tl.arange(0, FLAT)
    packed = tl.load(candidates + row * CHUNKS * columns + offsets, mask=offsets < CHUNKS * columns, other=_NONE)
    for column in range(columns):
        best = tl.max(packed, axis=0)
        tl.store(ids + out + column + 1, (best & 0xFFFFFFFF) ^ ID_MASK)
        tl.store(logprobs + out + column + 1, key_logit((best >> 32).to(tl.int32)) - total)
        packed = tl.where(packed == best, _NONE, packed)
