"""Which experts a token is given to, and rows in the order of experts, in Triton. The host learns nothing of it, so
that a graph can hold it, and nothing is added by atomics, so that every run gives the same.
"""

from __future__ import annotations

import triton
import triton.language as tl

_NOTHING = tl.constexpr(float("-inf"))
_LEAST_SUM = tl.constexpr(1e-20)
SOFTMAX = tl.constexpr(0)
CHOSEN_SOFTMAX = tl.constexpr(1)
SIGMOID = tl.constexpr(2)


@triton.jit
def _best(ranks: tl.tensor, free: tl.tensor, index: tl.tensor) -> tl.tensor:
    """The index of the largest that is free, the lowest of equal ones."""
    largest = tl.max(tl.where(free, ranks, _NOTHING))
    return tl.min(tl.where(free & (ranks == largest), index, 0x7FFFFFFF))


@triton.jit(
    do_not_specialize=["experts", "groups", "top_groups", "top_k", "scale"],
    do_not_specialize_on_alignment=["logits", "correction", "ids", "factors"],
)
def route_kernel(
    logits: tl.tensor,
    correction: tl.tensor,
    ids: tl.tensor,
    factors: tl.tensor,
    experts: tl.tensor,
    groups: tl.tensor,
    top_groups: tl.tensor,
    top_k: tl.tensor,
    scale: tl.tensor,
    KIND: tl.constexpr,
    NORMALISE: tl.constexpr,
    HAS_CORRECTION: tl.constexpr,
    BLOCK_GROUPS: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    BLOCK_CHOICES: tl.constexpr,
) -> None:
    # One token: experts lie as [groups, experts of a group]. What is no number ranks last, and makes factors NaN.
    token = tl.program_id(0).to(tl.int64)
    group, size = tl.arange(0, BLOCK_GROUPS), experts // groups
    place = tl.arange(0, BLOCK_SIZE)[None, :]
    index = group[:, None] * size + place
    is_expert = (group < groups)[:, None] & (place < size)
    score = tl.load(logits + token * experts + index, mask=is_expert, other=_NOTHING)
    if KIND == SOFTMAX:
        score = tl.exp(score - tl.max(score))
        score = score / tl.sum(score)
    if KIND == SIGMOID:
        score = 1.0 / (1.0 + tl.exp(-score))
    ranks = score
    if HAS_CORRECTION:
        ranks += tl.load(correction + index, mask=is_expert, other=0.0)
    ranks = tl.where(is_expert & (ranks == ranks), ranks, _NOTHING)
    if BLOCK_GROUPS > 1:
        first = tl.max(ranks, axis=1)
        at = tl.min(tl.where(ranks == first[:, None], place, BLOCK_SIZE), axis=1)
        second = tl.max(tl.where(place == at[:, None], _NOTHING, ranks), axis=1)
        total = tl.where(size > 1, first + second, first)
        unseen = group < groups
        for _ in range(top_groups):
            unseen = unseen & (group != _best(total, unseen, group))
        ranks = tl.where(unseen[:, None], _NOTHING, ranks)
    choice = tl.arange(0, BLOCK_CHOICES)
    chosen = tl.zeros([BLOCK_CHOICES], tl.int32)
    factor = tl.full([BLOCK_CHOICES], _NOTHING, tl.float32)
    free = is_expert
    for j in range(top_k):
        best = _best(ranks, free, index)
        free = free & (index != best)
        chosen = tl.where(choice == j, best, chosen)
        factor = tl.where(choice == j, tl.sum(tl.where(index == best, score, 0.0)), factor)
    is_choice = choice < top_k
    if KIND == CHOSEN_SOFTMAX:
        factor = tl.exp(factor - tl.max(factor))
        factor = factor / tl.sum(factor)
    elif NORMALISE:
        factor = factor / (tl.sum(tl.where(is_choice, factor, 0.0)) + _LEAST_SUM)
    is_number = tl.sum((is_expert & (score != score)).to(tl.int32)) == 0
    tl.store(ids + token * top_k + choice, chosen, mask=is_choice)
    tl.store(factors + token * top_k + choice, tl.where(is_number, factor * scale, float("nan")), mask=is_choice)


@triton.jit(do_not_specialize=["choices"], do_not_specialize_on_alignment=["ids", "counts"])
def count_kernel(ids: tl.tensor, counts: tl.tensor, choices: tl.tensor, BLOCK: tl.constexpr) -> None:
    # How often one expert was chosen.
    expert = tl.program_id(0)
    found = tl.zeros([BLOCK], tl.int32)
    for first in range(0, choices, BLOCK):
        at = first + tl.arange(0, BLOCK)
        found += (tl.load(ids + at, mask=at < choices, other=-1) == expert).to(tl.int32)
    tl.store(counts + expert, tl.sum(found))


@triton.jit(
    do_not_specialize=["choices", "tiles"], do_not_specialize_on_alignment=["ids", "counts", "rows", "experts_of"]
)
def place_kernel(
    ids: tl.tensor,
    counts: tl.tensor,
    rows: tl.tensor,
    experts_of: tl.tensor,
    choices: tl.tensor,
    tiles: tl.tensor,
    LINES: tl.constexpr,
    BLOCK_EXPERTS: tl.constexpr,
    BLOCK: tl.constexpr,
) -> None:
    # One expert's choices, in their order, from the first tile after the others' on: `rows` [tiles, LINES] gets their
    # numbers, and `choices` where a tile has no more; `experts_of` [tiles] the expert, and -1 behind the last.
    expert, count = tl.program_id(0), tl.num_programs(0)
    index = tl.arange(0, BLOCK_EXPERTS)
    needed = (tl.load(counts + index, mask=index < count, other=0) + LINES - 1) // LINES
    before = tl.sum(tl.where(index < expert, needed, 0))
    own = tl.sum(tl.where(index == expert, needed, 0))
    lane = tl.arange(0, BLOCK)
    filled = before * LINES
    for first in range(0, choices, BLOCK):
        at = first + lane
        is_own = tl.load(ids + at, mask=at < choices, other=-1) == expert
        rank = tl.cumsum(is_own.to(tl.int32), 0)
        tl.store(rows + filled + rank - 1, at, mask=is_own)
        filled += tl.sum(is_own.to(tl.int32))
    for first in range(filled, (before + own) * LINES, BLOCK):
        at = first + lane
        tl.store(rows + at, tl.zeros([BLOCK], tl.int32) + choices, mask=at < (before + own) * LINES)
    for first in range(before, before + own, BLOCK):
        at = first + lane
        tl.store(experts_of + at, tl.zeros([BLOCK], tl.int32) + expert, mask=at < before + own)
    if expert == count - 1:
        for first in range(before + own, tiles, BLOCK):
            at = first + lane
            tl.store(experts_of + at, tl.full([BLOCK], -1, tl.int32), mask=at < tiles)


@triton.jit(do_not_specialize=["n", "top_k"], do_not_specialize_on_alignment=["ids", "factors"])
def combine_kernel(
    products: tl.tensor,
    ids: tl.tensor,
    factors: tl.tensor,
    residual: tl.tensor,
    y: tl.tensor,
    n: tl.tensor,
    top_k: tl.tensor,
    HAS_RESIDUAL: tl.constexpr,
    BLOCK: tl.constexpr,
) -> None:
    # A token's products times their factors, added in the order of its choices; those of id -1 are not read.
    token = tl.program_id(0).to(tl.int64)
    at = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = at < n
    total = tl.zeros([BLOCK], tl.float32)
    for choice in range(top_k):
        place = token * top_k + choice
        is_here = tl.load(ids + place) >= 0
        product = tl.load(products + place * n + at, mask=inside & is_here, other=0.0).to(tl.float32)
        total += product * tl.load(factors + place, mask=is_here, other=0.0)
    result = total.to(y.dtype.element_ty)
    if HAS_RESIDUAL:
        result += tl.load(residual + token * n + at, mask=inside, other=0.0)
    tl.store(y + token * n + at, result, mask=inside)
