"""A tile of a matrix in its format, as Triton kernels multiply it. What differs between formats is here and nowhere
else; layouts are made by `engine.weights.device_packing`.

Inputs come in groups of 32. A tile of a quantised matrix is two: the first 16 inputs of each group, and the last 16, as
they lie in a byte of nibbles; rows of x are read in the same two parts, so that nothing is shuffled.
"""

from __future__ import annotations

import triton
import triton.language as tl

from engine.cpu_kernels.formats import Format
from engine.models import product_kernels

DENSE = tl.constexpr(product_kernels.DENSE)
_FLOAT8 = tl.constexpr(int(Format.FLOAT8))
_INT8 = tl.constexpr(int(Format.INT8))
_Q4_0 = tl.constexpr(int(Format.Q4_0))
_Q4_1 = tl.constexpr(int(Format.Q4_1))
_Q8_0 = tl.constexpr(int(Format.Q8_0))
_Q4_K = tl.constexpr(int(Format.Q4_K))
_Q6_K = tl.constexpr(int(Format.Q6_K))
_INT4_GROUP = tl.constexpr(int(Format.INT4_GROUP))


@triton.jit
def dense_tile(
    weight: tl.tensor,
    base: tl.tensor,
    lines: tl.tensor,
    at: tl.tensor,
    n: tl.tensor,
    k: tl.tensor,
    TRANSPOSED: tl.constexpr,
) -> tl.tensor:
    """[inputs, lines] of a matrix [n, k] that begins at line `base`. TRANSPOSED: it lies as [k, n], and has less than
    2^31 elements."""
    if TRANSPOSED:
        places = at[:, None] * n + (lines - base).to(tl.int32)[None, :]
        tile = tl.load(weight + base * k + places, mask=(at < k)[:, None], other=0.0)
    else:
        tile = tl.trans(tl.load(weight + lines[:, None] * k + at[None, :], mask=(at < k)[None, :], other=0.0))
    return tile


@triton.jit
def _half_number(bits: tl.tensor) -> tl.tensor:
    return bits.to(tl.float16, bitcast=True).to(tl.float32)


@triton.jit
def _levels(
    levels: tl.tensor,
    lines: tl.tensor,
    first: tl.tensor,
    groups: tl.tensor,
    FORMAT: tl.constexpr,
    LINES: tl.constexpr,
    COUNT: tl.constexpr,
) -> tuple[tl.tensor, tl.tensor]:
    # As they are stored; of four and six bits int32.
    lane = tl.arange(0, COUNT * 16)
    mask = (first + lane // 16 < groups)[None, :]
    if FORMAT == _INT8 or FORMAT == _Q8_0 or FORMAT == _FLOAT8:  # noqa: SIM109 - Triton has no `in`
        places = levels + lines[:, None] * (groups * 32) + (first * 32 + lane // 16 * 32 + lane % 16)[None, :]
        low, high = tl.load(places, mask=mask, other=0), tl.load(places + 16, mask=mask, other=0)
        low, high = tl.reshape(low, [LINES, COUNT, 16]), tl.reshape(high, [LINES, COUNT, 16])
    else:
        blocks = groups // 8
        row = blocks * 192 if FORMAT == _Q6_K else groups * 16
        packed = tl.load(levels + lines[:, None] * row + (first * 16 + lane)[None, :], mask=mask, other=0)
        packed = tl.reshape(packed, [LINES, COUNT, 16]).to(tl.int32)
        low, high = packed & 15, packed >> 4
        if FORMAT == _Q6_K:  # a byte of the upper bits belongs to two groups
            upper = (
                levels + lines[:, None] * row + blocks * 128 + (first // 2 * 16 + lane // 32 * 16 + lane % 16)[None, :]
            )
            shift = ((first + tl.arange(0, COUNT)) % 2 * 4)[None, :, None]
            bits = tl.reshape(tl.load(upper, mask=mask, other=0), [LINES, COUNT, 16]).to(tl.int32) >> shift
            low, high = low | (bits & 3) << 4, high | (bits & 12) << 2
    return low, high


@triton.jit
def halves(
    levels: tl.tensor,
    scales: tl.tensor,
    lines: tl.tensor,
    first: tl.tensor,
    groups: tl.tensor,
    scale_groups: tl.tensor,
    FORMAT: tl.constexpr,
    LINES: tl.constexpr,
    COUNT: tl.constexpr,
) -> tuple[tl.tensor, tl.tensor]:
    """float32 [LINES, COUNT, 16] twice: the first and the last 16 inputs of the groups from `first` on, an even number,
    of which a line has `groups`. Beyond those are zeros."""
    low, high = _levels(levels, lines, first, groups, FORMAT, LINES, COUNT)
    at = (first + tl.arange(0, COUNT))[None, :]
    inside = at < groups
    if FORMAT == _Q4_K or FORMAT == _Q6_K:  # noqa: SIM109
        words = 9 if FORMAT == _Q6_K else 10
        heads = scales + lines[:, None] * (groups // 8 * words) + at // 8 * words
        of_group = tl.load(heads + words - 8 + at % 8, mask=inside, other=0).to(tl.int32)
        scale = _half_number(tl.load(heads, mask=inside, other=0))
        if FORMAT == _Q6_K:
            low = (low - 32).to(tl.float32) * (scale * (of_group << 24 >> 24).to(tl.float32))[:, :, None]
            high = (high - 32).to(tl.float32) * (scale * (of_group << 16 >> 24).to(tl.float32))[:, :, None]
        else:
            minimum = _half_number(tl.load(heads + 1, mask=inside, other=0))
            minimum = (minimum * (of_group >> 8 & 255).to(tl.float32))[:, :, None]
            scale = (scale * (of_group & 255).to(tl.float32))[:, :, None]
            low, high = low.to(tl.float32) * scale - minimum, high.to(tl.float32) * scale - minimum
    elif FORMAT == _Q4_1 or FORMAT == _INT4_GROUP:  # noqa: SIM109
        heads = scales + (lines[:, None] * groups + at) * 2
        scale = _half_number(tl.load(heads, mask=inside, other=0))[:, :, None]
        other = _half_number(tl.load(heads + 1, mask=inside, other=0))[:, :, None]
        if FORMAT == _Q4_1:
            low, high = low.to(tl.float32) * scale + other, high.to(tl.float32) * scale + other
        else:
            low, high = (low.to(tl.float32) - other) * scale, (high.to(tl.float32) - other) * scale
    else:
        places = scales + lines[:, None] * (groups // scale_groups) + at // scale_groups
        scale = tl.load(places, mask=inside, other=0)
        scale = (_half_number(scale) if scales.dtype.element_ty == tl.int16 else scale)[:, :, None]
        if FORMAT == _Q4_0:
            low, high = (low - 8).to(tl.float32) * scale, (high - 8).to(tl.float32) * scale
        elif FORMAT == _FLOAT8:
            low, high = _float8(low) * scale, _float8(high) * scale
        else:
            low, high = low.to(tl.float32) * scale, high.to(tl.float32) * scale
    return low, high


@triton.jit
def _float8(bits: tl.tensor) -> tl.tensor:
    """e4m3 by its bits, which float16 holds shifted: GPUs before sm_89 have no such type."""
    wide = bits.to(tl.int32)
    return ((wide & 128) << 8 | (wide & 127) << 7).to(tl.int16).to(tl.float16, bitcast=True).to(tl.float32) * 256.0
