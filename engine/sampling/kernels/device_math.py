"""Arithmetic that the sampling kernels share: order keys, noise, fixed-point masses, and the levels of a row.

All kernels are launched without the fusion of multiplication and addition, and divide with correct rounding where a
comparison hangs on it, so that a GPU rounds as the torch path on a CPU does. exp and log are the exceptions.
"""

from __future__ import annotations

import triton
import triton.language as tl

from engine.sampling import columns

TEMPERATURE = tl.constexpr(columns.TEMPERATURE)
TOP_P = tl.constexpr(columns.TOP_P)
LOG_MIN_P = tl.constexpr(columns.LOG_MIN_P)
NUM_FLOATS = tl.constexpr(columns.NUM_FLOATS)
SEED_WORDS = tl.constexpr(columns.SEED_WORDS)
TOP_K = tl.constexpr(columns.TOP_K)
NUM_INTS = tl.constexpr(columns.NUM_INTS)

ID_MASK = tl.constexpr(0x7FFFFFFF)
LEVELS = tl.constexpr(16)
"""cuts of a row's range of logits; the last is minus infinity"""
_REACH = tl.constexpr(40.0)
"""Masses vanish at 31 temperatures below the maximum; outliers (masks of -1e9, say) must not stretch the levels."""
_GOLDEN = tl.constexpr(0x9E3779B9)
_POSITION_STEP = tl.constexpr(0x85EBCA6B)
_MULTIPLIER_1 = tl.constexpr(0x7FEB352D)
_MULTIPLIER_2 = tl.constexpr(0x846CA68B)
_UNIT = tl.constexpr(2.0**-31 * (1.0 - 2.0**-24))


@triton.jit
def order_key(logits: tl.tensor) -> tl.tensor:
    """int32 that orders as the logits do (order.py); NaN above everything, so that a maximum shows it."""
    logits = tl.where(logits == 0.0, 0.0, logits)  # -0 equals +0
    bits = logits.to(tl.int32, bitcast=True)
    return tl.where(logits != logits, 0x7FFFFFFF, bits ^ ((bits >> 31) & 0x7FFFFFFF))


@triton.jit
def key_logit(key: tl.tensor) -> tl.tensor:
    return (key ^ ((key >> 31) & 0x7FFFFFFF)).to(tl.float32, bitcast=True)


@triton.jit
def _mix(x: tl.tensor) -> tl.tensor:
    x = x ^ (x >> 16)
    x = x * _MULTIPLIER_1
    x = x ^ (x >> 15)
    x = x * _MULTIPLIER_2
    return x ^ (x >> 16)


@triton.jit
def draw_keys(words: tl.tensor, position: tl.tensor) -> tuple[tl.tensor, tl.tensor]:
    """noise.py: uint32 keys k0, k1 of a row."""
    at = position.to(tl.uint32)
    low = words.to(tl.uint32) + at * _GOLDEN
    high = (words >> 32).to(tl.uint32) + at * _POSITION_STEP
    return _mix(low), _mix(high)


@triton.jit
def log_exponential(token_ids: tl.tensor, k0: tl.tensor, k1: tl.tensor) -> tl.tensor:
    """noise.py: log(E) of tokens. log1p by Kahan's correction, exact to a few units in the last place."""
    x = token_ids.to(tl.uint32) * _GOLDEN + k0
    x = x ^ (x >> 16)
    x = x * _MULTIPLIER_1 + k1
    x = x ^ (x >> 15)
    x = x * _MULTIPLIER_2
    signed = x.to(tl.int32, bitcast=True)
    uniform = ((signed ^ (signed >> 16)).to(tl.float32) + 0.5) * _UNIT
    rest = 1.0 - uniform
    lost = rest - 1.0
    exact = lost == 0.0
    return tl.log(tl.where(exact, uniform, tl.log(rest) * uniform / tl.where(exact, -1.0, lost)))


@triton.jit
def scaled(logits: tl.tensor, top: tl.tensor, temperature: tl.tensor) -> tl.tensor:
    """log p up to a constant that makes the largest 0."""
    gap = logits - top
    return tl.div_rn(gap, tl.zeros_like(gap) + temperature)


@triton.jit
def mass(scaled_logits: tl.tensor, log_min_p: tl.tensor, UNIT: tl.constexpr) -> tl.tensor:
    """draw.py: fixed-point probability that min-p leaves, int64, with 1 as `UNIT`; 0 for NaN."""
    kept = scaled_logits >= log_min_p
    return (tl.exp(tl.where(kept, scaled_logits, float("-inf"))) * UNIT).to(tl.int64)


@triton.jit
def row_top(chunk_keys: tl.tensor, CHUNKS: tl.constexpr, PADDED: tl.constexpr) -> tl.tensor:
    """The order key of a row's largest logit."""
    chunk = tl.arange(0, PADDED)
    return tl.max(tl.load(chunk_keys + chunk, mask=chunk < CHUNKS, other=-0x7FFFFFFF), axis=0)


@triton.jit
def row_levels(
    top: tl.tensor, chunk_lows: tl.tensor, temperature: tl.tensor, CHUNKS: tl.constexpr, PADDED: tl.constexpr
) -> tl.tensor:
    """Falling cuts float32 `[LEVELS]` through a row's range of logits."""
    chunk = tl.arange(0, PADDED)
    low = tl.min(tl.load(chunk_lows + chunk, mask=chunk < CHUNKS, other=float("inf")), axis=0)
    reach = tl.minimum(top - low, tl.maximum(temperature, 1.0) * _REACH)
    level = tl.arange(0, LEVELS)
    return tl.where(level == LEVELS - 1, float("-inf"), top - reach * ((level + 1).to(tl.float32) * (1.0 / 15)))


@triton.jit
def pick(values: tl.tensor, index: tl.tensor) -> tl.tensor:
    """values[index] of `[LEVELS]`; 0 for index -1."""
    return tl.sum(tl.where(tl.arange(0, LEVELS) == index, values, 0), axis=0)


@triton.jit
def pick_level(levels: tl.tensor, index: tl.tensor) -> tl.tensor:
    """levels[index]; infinity for index -1."""
    return tl.min(tl.where(tl.arange(0, LEVELS) == index, levels, float("inf")), axis=0)


@triton.jit
def top_p_target(total: tl.tensor, top_p: tl.tensor) -> tl.tensor:
    return tl.maximum(tl.ceil(total.to(tl.float64) * top_p.to(tl.float64)).to(tl.int64), 1)


@triton.jit
def first_level(sums: tl.tensor, target: tl.tensor) -> tl.tensor:
    """The first level whose cumulative sum reaches `target`."""
    return tl.min(tl.where(sums >= target, tl.arange(0, LEVELS), LEVELS - 1), axis=0)


@triton.jit
def bracket(counts: tl.tensor, masses: tl.tensor, top_k: tl.tensor, top_p: tl.tensor) -> tuple[tl.tensor, tl.tensor]:
    """(first, last): the borders of top-k and top-p lie at or above level `last` and below level `first - 1`.

    With both filters top-p's target is a part of what top-k leaves, of which the levels give a lower bound only.
    """
    by_count = first_level(counts, top_k)
    least = tl.where(top_k > 0, pick(masses, by_count - 1), pick(masses, LEVELS - 1))
    by_mass = first_level(masses, top_p_target(least, top_p))
    last = tl.where(top_k > 0, by_count, by_mass)
    first = tl.where(top_p < 1.0, tl.minimum(by_mass, last), last)
    return first, last
