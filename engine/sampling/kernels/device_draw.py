"""One pass of maxima, one pass of noise, and a last small one: every row's token, whatever its parameters.

A row is spread over chunks of the vocabulary, so that a single row keeps many multiprocessors busy. What a chunk
found is combined by whoever comes next: integers and maxima, which no order can change.
"""

from __future__ import annotations

import triton
import triton.language as tl

from engine.sampling.kernels.device_math import (
    LEVELS,
    LOG_MIN_P,
    NUM_FLOATS,
    NUM_INTS,
    NUM_SUMS,
    SEED_WORDS,
    SURVEYS,
    TEMPERATURE,
    draw_keys,
    gumbel_bound,
    key_logit,
    log_exponential,
    order_key,
    row_top,
    scaled,
    uniforms,
)

_HOPELESS = tl.constexpr(-25.5)
"""-log(E) lies in [-2.82, 22.2], and the first token is always kept: below this none can win"""
_LARGEST = tl.constexpr(0x7F7FFFFF)
"""order keys of the largest finite float32 and of its negative"""
_SMALLEST = tl.constexpr(-0x7F7FFFFF - 1)


@triton.jit
def scan_kernel(
    logits: tl.tensor,
    chunk_keys: tl.tensor,
    chunk_ids: tl.tensor,
    chunk_lows: tl.tensor,
    counts: tl.tensor,
    masses: tl.tensor,
    sums: tl.tensor,
    VOCAB: tl.constexpr,
    CHUNK: tl.constexpr,
    CHUNKS: tl.constexpr,
    FILTERED: tl.constexpr,
) -> None:
    # Program (row, chunk): the first token in order and, for the levels of filters, the smallest finite logit.
    row = tl.program_id(0).to(tl.int64)
    chunk = tl.program_id(1)
    ids = chunk * CHUNK + tl.arange(0, CHUNK)
    values = tl.load(logits + row * VOCAB + ids, mask=ids < VOCAB, other=float("-inf"))
    keys = tl.where(ids < VOCAB, order_key(values), -0x7FFFFFFF)
    best, place = tl.max(keys, axis=0, return_indices=True, return_indices_tie_break_left=True)
    tl.store(chunk_keys + row * CHUNKS + chunk, best)
    tl.store(chunk_ids + row * CHUNKS + chunk, chunk * CHUNK + place)
    if FILTERED:
        finite = tl.where(values > float("-inf"), values, float("inf"))
        tl.store(chunk_lows + row * CHUNKS + chunk, tl.min(finite, axis=0))
        if chunk == 0:  # the kernels that add up come after this one
            at = row * SURVEYS * LEVELS + tl.arange(0, SURVEYS * LEVELS)
            tl.store(counts + at, tl.zeros([SURVEYS * LEVELS], tl.int32))
            tl.store(masses + at, tl.zeros([SURVEYS * LEVELS], tl.float32))
            tl.store(sums + row * NUM_SUMS + tl.arange(0, NUM_SUMS), tl.zeros([NUM_SUMS], tl.int64))


@triton.jit(do_not_specialize_on_alignment=["rows", "positions"])
def draw_kernel(
    logits: tl.tensor,
    rows: tl.tensor,
    floats: tl.tensor,
    ints: tl.tensor,
    chunk_keys: tl.tensor,
    positions: tl.tensor,
    borders: tl.tensor,
    scores: tl.tensor,
    ids: tl.tensor,
    VOCAB: tl.constexpr,
    CHUNK: tl.constexpr,
    CHUNKS: tl.constexpr,
    PADDED: tl.constexpr,
    FILTERED: tl.constexpr,
) -> None:
    # Program (row, chunk): the largest score among the tokens that the row's filters keep.
    row = tl.program_id(0).to(tl.int64)
    chunk = tl.program_id(1)
    entry = tl.load(rows + row)
    temperature = tl.load(floats + entry * NUM_FLOATS + TEMPERATURE)
    if temperature > 0.0:
        top = key_logit(row_top(chunk_keys + row * CHUNKS, CHUNKS, PADDED))
        here = key_logit(tl.load(chunk_keys + row * CHUNKS + chunk))
        score = float("-inf")
        token = chunk * CHUNK
        if scaled(here, top, temperature) > _HOPELESS:
            token_ids = chunk * CHUNK + tl.arange(0, CHUNK)
            values = tl.load(logits + row * VOCAB + token_ids, mask=token_ids < VOCAB, other=float("-inf"))
            scale = scaled(values, top, temperature)
            kept = (token_ids < VOCAB) & (scale >= tl.load(floats + entry * NUM_FLOATS + LOG_MIN_P))
            if FILTERED:
                border = tl.load(borders + row * 2)
                limit = tl.load(borders + row * 2 + 1)
                keys = order_key(values)
                kept &= (keys > border) | ((keys == border) & (token_ids <= limit))
            words = tl.load(ints + entry * NUM_INTS + SEED_WORDS)
            k0, k1 = draw_keys(words, tl.load(positions + row))
            # A bound on every score costs a third of the scores. The token with the largest bound is nearly always the
            # winner; what could still beat its score makes all scores necessary.
            uniform = uniforms(token_ids, k0, k1)
            bounds = tl.where(kept, scale + gumbel_bound(uniform), float("-inf"))
            most, place = tl.max(bounds, axis=0, return_indices=True, return_indices_tie_break_left=True)
            if most > float("-inf"):
                value = tl.load(logits + row * VOCAB + token + place)
                score = scaled(value, top, temperature) - log_exponential(uniforms(token + place, k0, k1))
                if tl.sum((bounds >= score).to(tl.int32), axis=0) > 1:
                    drawn = tl.where(kept, scale - log_exponential(uniform), float("-inf"))
                    score, place = tl.max(drawn, axis=0, return_indices=True, return_indices_tie_break_left=True)
            token += place
        tl.store(scores + row * CHUNKS + chunk, score)
        tl.store(ids + row * CHUNKS + chunk, token)


@triton.jit(do_not_specialize_on_alignment=["rows"])
def finish_kernel(
    chunk_keys: tl.tensor,
    chunk_ids: tl.tensor,
    rows: tl.tensor,
    floats: tl.tensor,
    scores: tl.tensor,
    ids: tl.tensor,
    tokens: tl.tensor,
    faults: tl.tensor,
    CHUNKS: tl.constexpr,
    PADDED: tl.constexpr,
    DRAWN: tl.constexpr,
) -> None:
    # Program row: chunks are combined, the first among equals.
    row = tl.program_id(0).to(tl.int64)
    chunk = tl.arange(0, PADDED)
    mask = chunk < CHUNKS
    keys = tl.load(chunk_keys + row * CHUNKS + chunk, mask=mask, other=-0x7FFFFFFF)
    best, place = tl.max(keys, axis=0, return_indices=True, return_indices_tie_break_left=True)
    token = tl.load(chunk_ids + row * CHUNKS + place)
    if DRAWN:
        entry = tl.load(rows + row)
        if tl.load(floats + entry * NUM_FLOATS + TEMPERATURE) > 0.0:
            found = tl.load(scores + row * CHUNKS + chunk, mask=mask, other=float("-inf"))
            _, place = tl.max(found, axis=0, return_indices=True, return_indices_tie_break_left=True)
            token = tl.load(ids + row * CHUNKS + place)
    fault = (best > _LARGEST) | (best < _SMALLEST)
    tl.store(faults + row, fault)
    tl.store(tokens + row, tl.where(fault, 0, token).to(tl.int64))
