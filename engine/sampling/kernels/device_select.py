"""Where top-k and top-p end, without a sort: three kernels narrow a row's range of logits down to one key.

*Survey*: how many tokens, and how much mass, lie above each of 16 levels. *Gather*: the tokens between the two levels
that enclose the borders are listed. *Select*: a 9-ary search over the 32-bit order key counts in that list alone.
Counts and masses are integers, so neither the order of atomics nor that of the list can change the result.
"""

from __future__ import annotations

import triton
import triton.language as tl

from engine.sampling.kernels.device_math import (
    ID_MASK,
    LEVELS,
    LOG_MIN_P,
    NUM_FLOATS,
    NUM_INTS,
    TEMPERATURE,
    TOP_K,
    TOP_P,
    bracket,
    key_logit,
    mass,
    order_key,
    pick,
    pick_level,
    row_levels,
    row_top,
    scaled,
    top_p_target,
)

_PIVOTS = tl.constexpr(8)
_COUNT = tl.constexpr(0)
_MASS = tl.constexpr(1)
_TIES = tl.constexpr(2)


@triton.jit(do_not_specialize_on_alignment=["rows"])
def survey_kernel(
    logits: tl.tensor,
    rows: tl.tensor,
    floats: tl.tensor,
    ints: tl.tensor,
    chunk_keys: tl.tensor,
    chunk_lows: tl.tensor,
    sums: tl.tensor,
    VOCAB: tl.constexpr,
    CHUNK: tl.constexpr,
    CHUNKS: tl.constexpr,
    PADDED: tl.constexpr,
    UNIT: tl.constexpr,
    LANES: tl.constexpr,
) -> None:
    # Program (row, chunk) adds its counts and masses to sums[row, 0] and sums[row, 1].
    row = tl.program_id(0).to(tl.int64)
    chunk = tl.program_id(1)
    entry = tl.load(rows + row)
    floats += entry * NUM_FLOATS
    temperature = tl.load(floats + TEMPERATURE)
    if (temperature > 0.0) & ((tl.load(floats + TOP_P) < 1.0) | (tl.load(ints + entry * NUM_INTS + TOP_K) > 0)):
        top = key_logit(row_top(chunk_keys + row * CHUNKS, CHUNKS, PADDED))
        levels = row_levels(top, chunk_lows + row * CHUNKS, temperature, CHUNKS, PADDED)
        log_min_p = tl.load(floats + LOG_MIN_P)
        counts = tl.zeros([LEVELS, LANES], tl.int32)
        masses = tl.zeros([LEVELS, LANES], tl.int64)
        for start in range(0, CHUNK, LANES):
            ids = chunk * CHUNK + start + tl.arange(0, LANES)
            values = tl.load(logits + row * VOCAB + ids, mask=ids < VOCAB, other=float("nan"))
            weights = mass(scaled(values, top, temperature), log_min_p, UNIT)
            above = values[None, :] >= levels[:, None]
            counts += above.to(tl.int32)
            masses += tl.where(above, weights[None, :], 0)
        target = sums + row * 2 * LEVELS + tl.arange(0, LEVELS)
        tl.atomic_add(target, tl.sum(counts, axis=1).to(tl.int64), sem="relaxed")
        tl.atomic_add(target + LEVELS, tl.sum(masses, axis=1), sem="relaxed")


@triton.jit(do_not_specialize_on_alignment=["rows"])
def gather_kernel(
    logits: tl.tensor,
    rows: tl.tensor,
    floats: tl.tensor,
    ints: tl.tensor,
    chunk_keys: tl.tensor,
    chunk_lows: tl.tensor,
    sums: tl.tensor,
    sizes: tl.tensor,
    listed: tl.tensor,
    VOCAB: tl.constexpr,
    CHUNK: tl.constexpr,
    CHUNKS: tl.constexpr,
    PADDED: tl.constexpr,
    CAPACITY: tl.constexpr,
) -> None:
    # Program (row, chunk) appends (key, id) of its tokens inside the bracket to listed[row], in any order. What does
    # not fit is counted all the same: `select_kernel` then reads the whole row.
    row = tl.program_id(0).to(tl.int64)
    chunk = tl.program_id(1)
    entry = tl.load(rows + row)
    temperature = tl.load(floats + entry * NUM_FLOATS + TEMPERATURE)
    top_p = tl.load(floats + entry * NUM_FLOATS + TOP_P)
    top_k = tl.load(ints + entry * NUM_INTS + TOP_K)
    if (temperature > 0.0) & ((top_p < 1.0) | (top_k > 0)):
        top = key_logit(row_top(chunk_keys + row * CHUNKS, CHUNKS, PADDED))
        levels = row_levels(top, chunk_lows + row * CHUNKS, temperature, CHUNKS, PADDED)
        row_sums = sums + row * 2 * LEVELS + tl.arange(0, LEVELS)
        first, last = bracket(tl.load(row_sums), tl.load(row_sums + LEVELS), top_k, top_p)
        low = pick_level(levels, last)
        high = pick_level(levels, first - 1)
        if key_logit(tl.load(chunk_keys + row * CHUNKS + chunk)) >= low:
            ids = chunk * CHUNK + tl.arange(0, CHUNK)
            values = tl.load(logits + row * VOCAB + ids, mask=ids < VOCAB, other=float("nan"))
            inside = (values >= low) & (values < high)
            found = tl.sum(inside.to(tl.int32), axis=0)
            if found > 0:
                places = tl.atomic_add(sizes + row, found, sem="relaxed") + tl.cumsum(inside.to(tl.int32), axis=0) - 1
                packed = (order_key(values).to(tl.int64) << 32) | ids
                tl.store(listed + row * CAPACITY + places, packed, mask=inside & (places < CAPACITY))


@triton.jit
def _weights(
    keys: tl.tensor,
    ids: tl.tensor,
    inside: tl.tensor,
    tie: tl.tensor,
    top: tl.tensor,
    temperature: tl.tensor,
    log_min_p: tl.tensor,
    UNIT: tl.constexpr,
    MODE: tl.constexpr,
) -> tuple[tl.tensor, tl.tensor]:
    """(what a search orders by, int64; the weight that it adds up, int64)."""
    if MODE == _TIES:
        return (ids ^ ID_MASK).to(tl.int64), (inside & (keys == tie)).to(tl.int64)
    if MODE == _COUNT:
        return keys.to(tl.int64), inside.to(tl.int64)
    weight = mass(scaled(key_logit(keys), top, temperature), log_min_p, UNIT)
    return keys.to(tl.int64), tl.where(inside, weight, 0)


@triton.jit
def _weight_above(
    pivots: tl.tensor,
    logits: tl.tensor,
    listed: tl.tensor,
    size: tl.tensor,
    low: tl.tensor,
    high: tl.tensor,
    tie: tl.tensor,
    top: tl.tensor,
    temperature: tl.tensor,
    log_min_p: tl.tensor,
    VOCAB: tl.constexpr,
    UNIT: tl.constexpr,
    CAPACITY: tl.constexpr,
    BLOCK: tl.constexpr,
    MODE: tl.constexpr,
) -> tl.tensor:
    """int64 `[_PIVOTS]`: the weight in the bracket at or above each of `pivots`."""
    sums = tl.zeros([_PIVOTS, BLOCK], tl.int64)
    fits = size <= CAPACITY
    for start in range(0, tl.where(fits, size, VOCAB), BLOCK):
        places = start + tl.arange(0, BLOCK)
        if fits:
            packed = tl.load(listed + places, mask=places < size, other=0)
            keys = (packed >> 32).to(tl.int32)
            ids = (packed & ID_MASK).to(tl.int32)
            inside = places < size
        else:
            values = tl.load(logits + places, mask=places < VOCAB, other=float("nan"))
            keys = order_key(values)
            ids = places
            inside = (values >= low) & (values < high)
        ordered, weights = _weights(keys, ids, inside, tie, top, temperature, log_min_p, UNIT, MODE)
        sums += tl.where(ordered[None, :] >= pivots[:, None], weights[None, :], 0)
    return tl.sum(sums, axis=1)


@triton.jit
def _search(
    lowest: tl.tensor,
    highest: tl.tensor,
    above: tl.tensor,
    within: tl.tensor,
    target: tl.tensor,
    logits: tl.tensor,
    listed: tl.tensor,
    size: tl.tensor,
    low: tl.tensor,
    high: tl.tensor,
    tie: tl.tensor,
    top: tl.tensor,
    temperature: tl.tensor,
    log_min_p: tl.tensor,
    VOCAB: tl.constexpr,
    UNIT: tl.constexpr,
    CAPACITY: tl.constexpr,
    BLOCK: tl.constexpr,
    MODE: tl.constexpr,
) -> tuple[tl.tensor, tl.tensor, tl.tensor]:
    """The largest t in [lowest, highest], int64, with weight(>= t) >= target; then weight(> t) and weight(>= t).

    `above` is the weight above the bracket, which is weight(> highest) and less than the target; `within` is
    weight(>= lowest) and reaches it. The interval shrinks about ninefold a turn, whatever the data.
    """
    pivot = tl.arange(0, _PIVOTS)
    beyond = above
    while lowest < highest:
        step = (highest - lowest) // (_PIVOTS + 1) + 1
        pivots = tl.minimum(lowest + (pivot + 1) * step, highest + 1)
        found = above + _weight_above(
            pivots, logits, listed, size, low, high, tie, top, temperature, log_min_p,
            VOCAB, UNIT, CAPACITY, BLOCK, MODE,
        )  # fmt: skip
        reached = tl.sum((found >= target).to(tl.int64), axis=0)
        beyond = tl.where(reached < _PIVOTS, tl.sum(tl.where(pivot == reached, found, 0), axis=0), beyond)
        within = tl.where(reached > 0, tl.sum(tl.where(pivot == reached - 1, found, 0), axis=0), within)
        bound = lowest + (reached + 1) * step - 1
        lowest += reached * step
        highest = tl.minimum(bound, highest)
    return lowest, beyond, within


@triton.jit
def _borders(
    top_k: tl.tensor,
    top_p: tl.tensor,
    counts: tl.tensor,
    masses: tl.tensor,
    levels: tl.tensor,
    logits: tl.tensor,
    listed: tl.tensor,
    size: tl.tensor,
    top_key: tl.tensor,
    temperature: tl.tensor,
    log_min_p: tl.tensor,
    VOCAB: tl.constexpr,
    UNIT: tl.constexpr,
    CAPACITY: tl.constexpr,
    BLOCK: tl.constexpr,
) -> tuple[tl.tensor, tl.tensor]:
    """(border key int64; how many of the tokens equal to it are kept, int64: 0 for all) of a row that filters."""
    first, last = bracket(counts, masses, top_k, top_p)
    low = pick_level(levels, last)
    high = pick_level(levels, first - 1)
    lowest = order_key(low).to(tl.int64)
    highest = tl.minimum(order_key(high).to(tl.int64) - 1, top_key.to(tl.int64))
    top = key_logit(top_key)
    mass_above = pick(masses, first - 1)
    total = pick(masses, LEVELS - 1)
    key = lowest
    ties = tl.zeros([], tl.int64)
    if top_k > 0:
        key, before, within = _search(
            lowest, highest, pick(counts, first - 1), pick(counts, last), top_k, logits, listed, size, low, high,
            top_key, top, temperature, log_min_p, VOCAB, UNIT, CAPACITY, BLOCK, _COUNT,
        )  # fmt: skip
        ties = tl.where(top_k >= within, 0, top_k - before)
        if top_p < 1.0:
            over = _weight_above(
                tl.zeros([_PIVOTS], tl.int64) + key + 1, logits, listed, size, low, high, top_key, top, temperature,
                log_min_p, VOCAB, UNIT, CAPACITY, BLOCK, _MASS,
            )  # fmt: skip
            tied_mass = mass(scaled(key_logit(key.to(tl.int32)), top, temperature), log_min_p, UNIT)
            total = mass_above + tl.max(over, axis=0) + (top_k - before) * tied_mass
    if top_p < 1.0:
        target = top_p_target(total, top_p)
        key, before, within = _search(
            lowest, highest, mass_above, pick(masses, last), target, logits, listed, size, low, high,
            top_key, top, temperature, log_min_p, VOCAB, UNIT, CAPACITY, BLOCK, _MASS,
        )  # fmt: skip
        tied_mass = tl.maximum(mass(scaled(key_logit(key.to(tl.int32)), top, temperature), log_min_p, UNIT), 1)
        ties = (target - before + tied_mass - 1) // tied_mass
        ties = tl.where(before + ties * tied_mass >= within, 0, ties)
    return key, ties


@triton.jit(do_not_specialize_on_alignment=["rows"])
def select_kernel(
    logits: tl.tensor,
    rows: tl.tensor,
    floats: tl.tensor,
    ints: tl.tensor,
    chunk_keys: tl.tensor,
    chunk_lows: tl.tensor,
    sums: tl.tensor,
    sizes: tl.tensor,
    listed: tl.tensor,
    borders: tl.tensor,
    VOCAB: tl.constexpr,
    CHUNK: tl.constexpr,
    CHUNKS: tl.constexpr,
    PADDED: tl.constexpr,
    UNIT: tl.constexpr,
    CAPACITY: tl.constexpr,
    BLOCK: tl.constexpr,
) -> None:
    # Program row writes borders[row] = (key, id): kept is what lies above the key, and of its equals ids up to id.
    row = tl.program_id(0).to(tl.int64)
    entry = tl.load(rows + row)
    temperature = tl.load(floats + entry * NUM_FLOATS + TEMPERATURE)
    top_p = tl.load(floats + entry * NUM_FLOATS + TOP_P)
    top_k = tl.load(ints + entry * NUM_INTS + TOP_K)
    border = tl.full([], -0x80000000, tl.int32)
    limit = tl.zeros([], tl.int32) + VOCAB
    if (temperature > 0.0) & ((top_p < 1.0) | (top_k > 0)):
        logits += row * VOCAB
        listed += row * CAPACITY
        size = tl.load(sizes + row)
        log_min_p = tl.load(floats + entry * NUM_FLOATS + LOG_MIN_P)
        top_key = row_top(chunk_keys + row * CHUNKS, CHUNKS, PADDED)
        top = key_logit(top_key)
        levels = row_levels(top, chunk_lows + row * CHUNKS, temperature, CHUNKS, PADDED)
        row_sums = sums + row * 2 * LEVELS + tl.arange(0, LEVELS)
        counts, masses = tl.load(row_sums), tl.load(row_sums + LEVELS)
        key, ties = _borders(
            top_k, top_p, counts, masses, levels, logits, listed, size, top_key, temperature, log_min_p,
            VOCAB, UNIT, CAPACITY, BLOCK,
        )  # fmt: skip
        border = key.to(tl.int32)
        if ties > 0:
            first, last = bracket(counts, masses, top_k, top_p)
            none = tl.zeros([], tl.int64)
            found, _, _ = _search(
                none + (ID_MASK - VOCAB + 1), none + ID_MASK, none, none, ties, logits, listed, size,
                pick_level(levels, last), pick_level(levels, first - 1), border, top, temperature, log_min_p,
                VOCAB, UNIT, CAPACITY, BLOCK, _TIES,
            )  # fmt: skip
            limit = (found ^ ID_MASK).to(tl.int32)
    tl.store(borders + row * 2, border)
    tl.store(borders + row * 2 + 1, limit)
