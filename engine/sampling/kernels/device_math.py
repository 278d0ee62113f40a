"""Arithmetic that the sampling kernels share: order keys, noise, fixed-point masses, and the levels of a row.

All kernels are launched without the fusion of multiplication and addition, and divide with correct rounding where a
comparison hangs on it, so that a GPU rounds as the torch path on a CPU does. exp and log are the exceptions.
"""

from __future__ import annotations

import math

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
"""cuts of a range of logits"""
SURVEYS = tl.constexpr(2)
"""each narrows a row's range of logits to one of `LEVELS` parts, so the borders are sought in 1 / 256 of it"""
COUNT_ABOVE = tl.constexpr(0)
MASS_ABOVE = tl.constexpr(1)
MASS_LISTED = tl.constexpr(2)
TOTAL_MASS = tl.constexpr(3)
LISTED = tl.constexpr(4)
NUM_SUMS = tl.constexpr(8)
"""exact sums of a row, int64: tokens and mass above the listed ones, mass of these, of the row, and their number"""
_REACH = tl.constexpr(44.0)
"""Masses vanish at 31 temperatures below the maximum (with a vocabulary of two, at 42), and nothing is drawn from below
`_HOPELESS` (device_draw.py). Outliers (masks of -1e9, say) must not stretch the levels."""
_GOLDEN = tl.constexpr(0x9E3779B9)
_POSITION_STEP = tl.constexpr(0x85EBCA6B)
_MULTIPLIER_1 = tl.constexpr(0x7FEB352D)
_MULTIPLIER_2 = tl.constexpr(0x846CA68B)
_UNIT = tl.constexpr(2.0**-31 * (1.0 - 2.0**-24))
_ONE_BITS = tl.constexpr(0x3F800000)
_LOG_OF_BIT = tl.constexpr(-math.log(2) * 2.0**-23)
_SLACK = tl.constexpr(1e-3)


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
def uniforms(token_ids: tl.tensor, k0: tl.tensor, k1: tl.tensor) -> tl.tensor:
    """noise.py: the number in (0, 1) that is a token's noise."""
    x = token_ids.to(tl.uint32) * _GOLDEN + k0
    x = x ^ (x >> 16)
    x = x * _MULTIPLIER_1 + k1
    x = x ^ (x >> 15)
    x = x * _MULTIPLIER_2
    signed = x.to(tl.int32, bitcast=True)
    return ((signed ^ (signed >> 16)).to(tl.float32) + 0.5) * _UNIT


@triton.jit
def log_exponential(uniform: tl.tensor) -> tl.tensor:
    """noise.py: log(E). log1p by Kahan's correction, exact to a few units in the last place."""
    rest = 1.0 - uniform
    lost = rest - 1.0
    exact = lost == 0.0
    return tl.log(tl.where(exact, uniform, tl.log(rest) * uniform / tl.where(exact, -1.0, lost)))


@triton.jit
def gumbel_bound(uniform: tl.tensor) -> tl.tensor:
    """At least -log(E), by at most 0.07 where it matters (small E), and without a logarithm: E >= uniform, and the
    bits of a float are a scaled log2 of it, too small by up to 0.09. `_SLACK` outweighs every rounding."""
    bits = uniform.to(tl.int32, bitcast=True)
    return (bits - _ONE_BITS).to(tl.float32) * _LOG_OF_BIT + _SLACK


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
def row_bottom(
    top: tl.tensor, chunk_lows: tl.tensor, temperature: tl.tensor, CHUNKS: tl.constexpr, PADDED: tl.constexpr
) -> tl.tensor:
    """A logit below which no token of a row has mass, nor can be drawn: the smallest, unless that is far away."""
    chunk = tl.arange(0, PADDED)
    low = tl.min(tl.load(chunk_lows + chunk, mask=chunk < CHUNKS, other=float("inf")), axis=0)
    reach = tl.maximum(temperature, 1.0) * _REACH
    return tl.where(top - low <= reach, low, top - reach)


@triton.jit
def row_levels(top: tl.tensor, low: tl.tensor, high: tl.tensor) -> tl.tensor:
    """Falling cuts float32 `[LEVELS]` through the logits of [low, high); the last is `low`."""
    ceiling = tl.minimum(high, top)
    level = tl.arange(0, LEVELS)
    cuts = tl.maximum(ceiling - (ceiling - low) * ((level + 1).to(tl.float32) * (1.0 / LEVELS)), low)
    return tl.where(level == LEVELS - 1, low, cuts)


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
def row_span(
    row: tl.tensor,
    chunk_keys: tl.tensor,
    chunk_lows: tl.tensor,
    counts: tl.tensor,
    masses: tl.tensor,
    temperature: tl.tensor,
    top_k: tl.tensor,
    top_p: tl.tensor,
    CHUNKS: tl.constexpr,
    PADDED: tl.constexpr,
    ROUNDS: tl.constexpr,
) -> tuple[tl.tensor, tl.tensor, tl.tensor]:
    """(largest logit, low, high): after `ROUNDS` surveys the borders of top-k and top-p lie in [low, high).

    That is certain of top-k. Masses are floating-point sums here, so of top-p it is a guess that `select_kernel`
    verifies. With both filters top-p's target is a part of what top-k leaves, of which there is a lower bound only.
    """
    top = key_logit(row_top(chunk_keys + row * CHUNKS, CHUNKS, PADDED))
    low = row_bottom(top, chunk_lows + row * CHUNKS, temperature, CHUNKS, PADDED)
    high = tl.full([], float("inf"), tl.float32)
    least = tl.zeros([], tl.float32)
    for survey in tl.static_range(ROUNDS):
        levels = row_levels(top, low, high)
        at = (row * SURVEYS + survey) * LEVELS + tl.arange(0, LEVELS)
        mass_above = tl.load(masses + at)
        by_count = first_level(tl.load(counts + at), top_k)
        if survey == 0:
            least = tl.where(top_k > 0, least, pick(mass_above, LEVELS - 1))
        least = tl.where(top_k > 0, tl.maximum(least, pick(mass_above, by_count - 1)), least)
        by_mass = first_level(mass_above, least * top_p)
        last = tl.where(top_k > 0, by_count, by_mass)
        first = tl.where(top_p < 1.0, tl.minimum(by_mass, last), last)
        high = tl.minimum(high, pick_level(levels, first - 1))
        low = pick_level(levels, last)
    return top, low, high
