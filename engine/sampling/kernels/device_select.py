"""Where top-k and top-p end, without a sort: three kernels narrow a row's range of logits down to one key.

*Survey*, twice: how many tokens, and about how much mass, lie above each of 16 levels; the second time between the two
levels that enclose the borders. *Gather*: what is left between two levels is listed, and exact sums say what lies
above. *Select*: a 9-ary search over the 32-bit order key counts in that list alone; where the list does not fit, or
the surveys guessed wrong, in the whole row. Whatever decides is an integer, so neither the order of atomics nor that
of the list can change the result; the surveys' floating-point masses only decide how much work it is.
"""

from __future__ import annotations

import triton
import triton.language as tl

from engine.sampling.kernels.device_math import (
    COUNT_ABOVE,
    ID_MASK,
    LEVELS,
    LISTED,
    LOG_MIN_P,
    MASS_ABOVE,
    MASS_LISTED,
    NUM_FLOATS,
    NUM_INTS,
    NUM_SUMS,
    SURVEYS,
    TEMPERATURE,
    TOP_K,
    TOP_P,
    TOTAL_MASS,
    key_logit,
    mass,
    order_key,
    row_levels,
    row_span,
    row_top,
    scaled,
    top_p_target,
)

_PIVOTS = tl.constexpr(8)
_COUNT = tl.constexpr(0)
_MASS = tl.constexpr(1)
_TIES = tl.constexpr(2)
_MASSLESS = tl.constexpr(-44.0)
"""below this `mass` is 0, whatever the vocabulary"""


@triton.jit(do_not_specialize_on_alignment=["rows"])
def survey_kernel(
    logits: tl.tensor,
    rows: tl.tensor,
    floats: tl.tensor,
    ints: tl.tensor,
    chunk_keys: tl.tensor,
    chunk_lows: tl.tensor,
    counts: tl.tensor,
    masses: tl.tensor,
    VOCAB: tl.constexpr,
    CHUNK: tl.constexpr,
    CHUNKS: tl.constexpr,
    PADDED: tl.constexpr,
    SURVEY: tl.constexpr,
) -> None:
    # Program (row, chunk) adds what its tokens contribute to counts[row, SURVEY] and masses[row, SURVEY].
    row = tl.program_id(0).to(tl.int64)
    chunk = tl.program_id(1)
    entry = tl.load(rows + row)
    floats += entry * NUM_FLOATS
    temperature = tl.load(floats + TEMPERATURE)
    top_p = tl.load(floats + TOP_P)
    top_k = tl.load(ints + entry * NUM_INTS + TOP_K)
    if (temperature > 0.0) & ((top_p < 1.0) | (top_k > 0)):
        top, low, high = row_span(
            row, chunk_keys, chunk_lows, counts, masses, temperature, top_k, top_p, CHUNKS, PADDED, SURVEY
        )
        if key_logit(tl.load(chunk_keys + row * CHUNKS + chunk)) >= low:
            ids = chunk * CHUNK + tl.arange(0, CHUNK)
            values = tl.load(logits + row * VOCAB + ids, mask=ids < VOCAB, other=float("nan"))
            levels = row_levels(top, low, high)
            at = (row * SURVEYS + SURVEY) * LEVELS + tl.arange(0, LEVELS)
            if top_k > 0:
                above = values[None, :] >= levels[:, None]
                tl.atomic_add(counts + at, tl.sum(above.to(tl.int32), axis=1), sem="relaxed")
            if top_p < 1.0:  # compares again: 16 comparisons of each token do not stay in registers
                share = (values - top) * (1.0 / temperature)
                weights = tl.exp(tl.where(share >= tl.load(floats + LOG_MIN_P), share, float("-inf")))
                heavy = tl.where(values[None, :] >= levels[:, None], weights[None, :], 0.0)
                tl.atomic_add(masses + at, tl.sum(heavy, axis=1), sem="relaxed")


@triton.jit(do_not_specialize_on_alignment=["rows"])
def gather_kernel(
    logits: tl.tensor,
    rows: tl.tensor,
    floats: tl.tensor,
    ints: tl.tensor,
    chunk_keys: tl.tensor,
    chunk_lows: tl.tensor,
    counts: tl.tensor,
    masses: tl.tensor,
    sums: tl.tensor,
    spans: tl.tensor,
    listed: tl.tensor,
    VOCAB: tl.constexpr,
    CHUNK: tl.constexpr,
    CHUNKS: tl.constexpr,
    PADDED: tl.constexpr,
    UNIT: tl.constexpr,
    CAPACITY: tl.constexpr,
) -> None:
    # Program (row, chunk) appends (key, id) of its tokens in [low, high) to listed[row], in any order, and adds to the
    # exact sums. What does not fit is counted all the same: `select_kernel` then reads the whole row.
    row = tl.program_id(0).to(tl.int64)
    chunk = tl.program_id(1)
    entry = tl.load(rows + row)
    floats += entry * NUM_FLOATS
    temperature = tl.load(floats + TEMPERATURE)
    top_p = tl.load(floats + TOP_P)
    top_k = tl.load(ints + entry * NUM_INTS + TOP_K)
    if (temperature > 0.0) & ((top_p < 1.0) | (top_k > 0)):
        top, low, high = row_span(
            row, chunk_keys, chunk_lows, counts, masses, temperature, top_k, top_p, CHUNKS, PADDED, SURVEYS
        )
        if chunk == 0:
            tl.store(spans + row * 2, low)
            tl.store(spans + row * 2 + 1, high)
        here = key_logit(tl.load(chunk_keys + row * CHUNKS + chunk))
        weighed = (top_p < 1.0) & (scaled(here, top, temperature) >= _MASSLESS)
        if weighed | (here >= low):
            sums += row * NUM_SUMS
            ids = chunk * CHUNK + tl.arange(0, CHUNK)
            values = tl.load(logits + row * VOCAB + ids, mask=ids < VOCAB, other=float("nan"))
            above = values >= high
            inside = (values >= low) & (values < high)
            found = tl.sum(inside.to(tl.int32), axis=0)
            tl.atomic_add(sums + COUNT_ABOVE, tl.sum(above.to(tl.int32), axis=0).to(tl.int64), sem="relaxed")
            if weighed:
                weights = mass(scaled(values, top, temperature), tl.load(floats + LOG_MIN_P), UNIT)
                tl.atomic_add(sums + MASS_ABOVE, tl.sum(tl.where(above, weights, 0), axis=0), sem="relaxed")
                tl.atomic_add(sums + MASS_LISTED, tl.sum(tl.where(inside, weights, 0), axis=0), sem="relaxed")
                tl.atomic_add(sums + TOTAL_MASS, tl.sum(weights, axis=0), sem="relaxed")
            if found > 0:
                begin = tl.atomic_add(sums + LISTED, found.to(tl.int64), sem="relaxed")
                places = begin + tl.cumsum(inside.to(tl.int32), axis=0) - 1
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
def _first_ids(
    logits: tl.tensor, key: tl.tensor, wanted: tl.tensor, VOCAB: tl.constexpr, BLOCK: tl.constexpr
) -> tl.tensor:
    """The id of token number `wanted` (>= 1) among those of a row whose key is `key`: one pass, as far as needed."""
    place = tl.arange(0, BLOCK)
    start = tl.zeros([], tl.int32)
    left = wanted
    equal = (order_key(tl.load(logits + place, mask=place < VOCAB, other=float("nan"))) == key).to(tl.int32)
    found = tl.sum(equal, axis=0)
    while (found < left) & (start + BLOCK < VOCAB):
        left -= found
        start += BLOCK
        ids = start + place
        equal = (order_key(tl.load(logits + ids, mask=ids < VOCAB, other=float("nan"))) == key).to(tl.int32)
        found = tl.sum(equal, axis=0)
    return start + tl.sum(tl.where((equal > 0) & (tl.cumsum(equal, axis=0) == left), place, 0), axis=0)


@triton.jit
def _borders(
    top_k: tl.tensor,
    top_p: tl.tensor,
    sums: tl.tensor,
    low: tl.tensor,
    high: tl.tensor,
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
) -> tuple[tl.tensor, tl.tensor, tl.tensor]:
    """(border key int64; how many of the tokens equal to it are kept, int64: 0 for all; the size of the list, or more
    than fits where it must not be used) of a row that filters."""
    lowest = order_key(low).to(tl.int64)
    highest = tl.minimum(order_key(high).to(tl.int64) - 1, top_key.to(tl.int64))
    top = key_logit(top_key)
    count_above = tl.load(sums + COUNT_ABOVE)
    mass_above = tl.load(sums + MASS_ABOVE)
    mass_listed = tl.load(sums + MASS_LISTED)
    total = tl.load(sums + TOTAL_MASS)
    key = lowest
    ties = tl.zeros([], tl.int64)
    if (top_k > 0) & (top_k <= count_above + size):  # else it cuts off nothing that could be drawn
        key, before, within = _search(
            lowest, highest, count_above, count_above + size, top_k, logits, listed, size, low, high,
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
        within = mass_above + mass_listed
        if (mass_above >= target) | (within < target):  # the surveys' guess was wrong
            size = tl.zeros([], tl.int32) + CAPACITY + 1
            low = tl.full([], float("-inf"), tl.float32)
            high = tl.full([], float("inf"), tl.float32)
            lowest = order_key(low).to(tl.int64)
            highest = top_key.to(tl.int64)
            mass_above = tl.zeros([], tl.int64)
            within = tl.load(sums + TOTAL_MASS)
        key, before, within = _search(
            lowest, highest, mass_above, within, target, logits, listed, size, low, high,
            top_key, top, temperature, log_min_p, VOCAB, UNIT, CAPACITY, BLOCK, _MASS,
        )  # fmt: skip
        tied_mass = tl.maximum(mass(scaled(key_logit(key.to(tl.int32)), top, temperature), log_min_p, UNIT), 1)
        ties = (target - before + tied_mass - 1) // tied_mass
        ties = tl.where(before + ties * tied_mass >= within, 0, ties)
    return key, ties, size


@triton.jit(do_not_specialize_on_alignment=["rows"])
def select_kernel(
    logits: tl.tensor,
    rows: tl.tensor,
    floats: tl.tensor,
    ints: tl.tensor,
    chunk_keys: tl.tensor,
    sums: tl.tensor,
    spans: tl.tensor,
    listed: tl.tensor,
    borders: tl.tensor,
    VOCAB: tl.constexpr,
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
        sums += row * NUM_SUMS
        low = tl.load(spans + row * 2)
        high = tl.load(spans + row * 2 + 1)
        log_min_p = tl.load(floats + entry * NUM_FLOATS + LOG_MIN_P)
        top_key = row_top(chunk_keys + row * CHUNKS, CHUNKS, PADDED)
        size = tl.load(sums + LISTED).to(tl.int32)
        key, ties, size = _borders(
            top_k, top_p, sums, low, high, logits, listed, size, top_key, temperature, log_min_p,
            VOCAB, UNIT, CAPACITY, BLOCK,
        )  # fmt: skip
        border = key.to(tl.int32)
        if ties > 0:
            if size <= CAPACITY:
                none = tl.zeros([], tl.int64)
                found, _, _ = _search(
                    none + (ID_MASK - VOCAB + 1), none + ID_MASK, none, none, ties, logits, listed, size, low, high,
                    border, key_logit(top_key), temperature, log_min_p, VOCAB, UNIT, CAPACITY, BLOCK, _TIES,
                )  # fmt: skip
                limit = (found ^ ID_MASK).to(tl.int32)
            else:
                limit = _first_ids(logits, border, ties.to(tl.int32), VOCAB, BLOCK)
    tl.store(borders + row * 2, border)
    tl.store(borders + row * 2 + 1, limit)
