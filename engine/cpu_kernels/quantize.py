"""Weights quantised and packed for the CPU's linear layers: int8 and e4m3 with a scale an output, int4 with a scale and
a minimum for 32 inputs, blocks of a checkpoint re-ordered as they are; and `unpack`, which says what a packed matrix
stands for.

Layouts: `csrc/linear.h` and `csrc/group_formats.h`. Matrices are taken a few panels at a time, so that temporaries stay
in a core's cache whatever the matrix. Rows beyond n in the last panel are zeros.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor

from engine.cpu_kernels import block_packing, panel_parts
from engine.cpu_kernels.formats import PANEL, Format, panel_bytes
from engine.cpu_kernels.rotation import rotate, rotate_back

_GROUP = 32
_AT_ONCE = 1 << 18  # elements of a matrix whose temporaries stay in cache
_INT8_LEVELS = 127.0
_INT4_LEVELS = 15.0
_INT4_STEPS = (14.5, 15.5)
"""levels that the range of a group is first cut into: a little finer and a little coarser than the 15 there are"""
_HALF_MAX = 65504.0
_FLOAT8_MAX = 448.0
_SMALLEST = 2.0**-110
"""what is not larger counts as nothing: levels over it could be infinite"""


def pack_int8(weight: Tensor) -> Tensor:
    """weight: [n, k], any float dtype, k a multiple of 4 → uint8 [panels, panel_bytes], turned by `rotate_back` as the
    kernels turn activations by `rotate`. The scale of an output is its largest magnitude / 127 then (clipping gains
    nothing at 8 bits: the rounding error is far below that of activations).

    Raises ValueError: a weight is not finite, or k does not fit.
    """
    return _pack(weight, weight.shape[1], Format.INT8, _int8_panels)


def pack_int4(weight: Tensor) -> Tensor:
    """weight: [n, k], any float dtype, k a multiple of 32 → uint8 [panels, panel_bytes], Q4_1.

    Scale and minimum minimise the squared error over each 32 inputs: levels are assigned by two cuts of the range,
    each is given its best line (least squares, in closed form), and the better one is kept.
    Raises ValueError: a weight is not finite, or k does not fit.
    """
    return _pack(weight, weight.shape[1], Format.Q4_1, _int4_panels)


def pack_float8(weight: Tensor) -> Tensor:
    """weight: [n, k], any float dtype, k a multiple of 4 → uint8 [panels, panel_bytes], FLOAT8.

    Raises ValueError: a weight is not finite, or k does not fit.
    """
    return pack_blocks(float8_rows(weight), Format.FLOAT8)


def float8_rows(weight: Tensor) -> Tensor:
    """weight: [n, k], any float dtype → uint8 [n, k + 4], rows of e4m3 and a float32, the scale. That is an output's
    largest magnitude / 448, the largest e4m3, as vLLM quantises weights when it loads them. Raises ValueError: a weight
    is not finite."""
    weight = weight.float()
    largest = weight.abs().amax(1, keepdim=True)
    _check_finite(largest)
    inverse = torch.where(largest > _SMALLEST, _FLOAT8_MAX / largest, 0.0)
    values = weight.mul(inverse).clamp_(-_FLOAT8_MAX, _FLOAT8_MAX).to(torch.float8_e4m3fn)
    return torch.cat((values.view(torch.uint8), (largest / _FLOAT8_MAX).view(torch.uint8)), dim=1)


def pack_blocks(blocks: Tensor, format: Format) -> Tensor:
    """blocks: uint8 [n, bytes of a row], as a GGUF file holds them, or `engine.weights` makes them → uint8 [panels,
    panel_bytes]; the same values, bit for bit, never inflated. Raises ValueError: the format has no blocks, or rows are
    not whole ones."""
    layout = block_packing.LAYOUTS.get(format)
    if layout is None:
        raise ValueError(f"{format.name} has no blocks; these have: {_block_names()}")
    size = blocks.shape[1] - layout.tail_bytes
    if size % layout.block_bytes != 0:
        raise ValueError(f"a row of {blocks.shape[1]} bytes is not whole {format.name} blocks of {layout.block_bytes}")

    def to_panels(rows: Tensor) -> Tensor:
        groups = layout.to_panels(rows[..., :size].contiguous()).flatten(1)
        return torch.cat((groups, rows[..., size:].flatten(1)), dim=1) if layout.tail_bytes else groups

    return _pack(blocks, size // layout.block_bytes * layout.inputs, format, to_panels)


def unpack(packed: Tensor, n: int, k: int, format: Format) -> Tensor:
    """The values that a packed matrix stands for, float32 [n, k], computed as `engine.weights.gguf_dequant` does."""
    if format is Format.INT8:
        values = (
            packed[:, : k * PANEL].contiguous().view(torch.int8).view(-1, k // 4, PANEL, 4).transpose(1, 2).flatten(2)
        )
        scales = packed[:, k * PANEL : (k + 4) * PANEL].contiguous().view(torch.float32)
        return rotate((values.float() * scales[..., None]).flatten(0, 1)[:n])
    layout = block_packing.LAYOUTS.get(format)
    if layout is None:
        raise ValueError(f"{format.name} is not a quantised format")
    count, tail = k // layout.inputs, layout.tail_bytes * PANEL
    groups = packed[:, : count * layout.panel_bytes].reshape(-1, count, layout.panel_bytes)
    if tail:
        groups = torch.cat((groups, packed[:, None, -tail:].expand(-1, count, -1)), dim=2)
    return layout.from_panels(groups).transpose(1, 2).reshape(-1, k)[:n].contiguous()


def _block_names() -> str:
    return ", ".join(format.name for format in block_packing.LAYOUTS)


def _pack(rows: Tensor, k: int, format: Format, to_panels: Callable[[Tensor], Tensor]) -> Tensor:
    """`to_panels`: [panels, 32, ...] of `rows` → uint8 [panels, ...], the bytes of each."""
    panels = -(-rows.shape[0] // PANEL)
    packed = torch.empty(panels, panel_bytes(k, format), dtype=torch.uint8)
    run = max(1, _AT_ONCE // (PANEL * k))
    for start in range(0, panels, run):
        part = rows[start * PANEL : (start + run) * PANEL]
        count = -(-part.shape[0] // PANEL)
        if part.shape[0] < count * PANEL:
            part = F.pad(part, (0, 0, 0, count * PANEL - part.shape[0]))
        packed[start : start + count] = to_panels(part.reshape(count, PANEL, -1)).view(count, -1)
    return packed


def _int8_panels(weight: Tensor) -> Tensor:
    weight = rotate_back(weight.float())
    largest = weight.abs().amax(2, keepdim=True)
    _check_finite(largest)
    inverse = torch.where(largest > _SMALLEST, _INT8_LEVELS / largest, 0.0)
    levels = weight.mul(inverse).round_().clamp_(-_INT8_LEVELS, _INT8_LEVELS).to(torch.int8)
    by_input = levels.view(torch.int32).transpose(1, 2).contiguous()
    sums = levels.sum(2, dtype=torch.int32)
    tail = torch.stack(((largest[..., 0] / _INT8_LEVELS).view(torch.int32), sums), dim=1)
    return torch.cat((by_input.flatten(1), tail.flatten(1)), dim=1).view(torch.uint8)


def _int4_panels(weight: Tensor) -> Tensor:
    panels, _, k = weight.shape
    x = weight.reshape(-1, _GROUP).t().float().contiguous()  # inputs of a group down a column: reductions vectorise
    d, m = _int4_lines(x)
    d16, m16 = d.clamp_(max=_HALF_MAX).half(), m.clamp_(-_HALF_MAX, _HALF_MAX).half()
    d, m = d16.float(), m16.float()
    q = torch.addcmul(torch.where(d > 0, -m / d, 0.0), x, torch.where(d > 0, 1 / d, 0.0)).round_()
    levels = q.clamp_(0, _INT4_LEVELS).to(torch.uint8)
    nibbles = (levels[:16] | (levels[16:] << 4)).t().contiguous().view(panels, PANEL, k // _GROUP, 16)
    halves = torch.stack((d16.view(torch.int16), m16.view(torch.int16))).view(2, panels, PANEL, k // _GROUP)
    return panel_parts.join(panel_parts.by_input(nibbles), halves.permute(1, 3, 0, 2))


def _int4_lines(x: Tensor) -> tuple[Tensor, Tensor]:
    """x: float32 [32, groups] → the d >= 0 and m of each group for which d * q + m is near x, q in 0 to 15."""
    low, high = x.amin(0), x.amax(0)  # aminmax is ten times slower
    _check_finite(low, high)
    width = high - low
    sum_x = x.sum(0)
    best_gain = best_d = best_m = None
    q, product = torch.empty_like(x), torch.empty_like(x)
    for steps in _INT4_STEPS:
        inverse = torch.where(width > _SMALLEST, steps / width, 0.0)
        # The middle of the range falls on the middle of the levels, so that what does not fit is clipped on both sides.
        offset = _INT4_LEVELS / 2 - inverse * (low + high) / 2
        torch.addcmul(offset, x, inverse, out=q).round_().clamp_(0, _INT4_LEVELS)
        sum_q = q.sum(0)
        sum_xq = torch.mul(x, q, out=product).sum(0)
        sum_qq = torch.mul(q, q, out=product).sum(0)
        spread = sum_qq * _GROUP - sum_q * sum_q
        d = torch.where(spread > 0, (sum_xq * _GROUP - sum_x * sum_q) / spread, 0.0)
        m = (sum_x - d * sum_q) / _GROUP
        gain = d * sum_xq + m * sum_x  # sum of squares of x less the squared error
        if best_gain is None or best_d is None or best_m is None:
            best_gain, best_d, best_m = gain, d, m
        else:
            better = gain > best_gain
            best_gain = torch.where(better, gain, best_gain)
            best_d, best_m = torch.where(better, d, best_d), torch.where(better, m, best_m)
    assert best_d is not None and best_m is not None
    return best_d, best_m


def _check_finite(*extremes: Tensor) -> None:
    if not all(bool(extreme.isfinite().all()) for extreme in extremes):
        raise ValueError("a weight is not finite, so the matrix cannot be quantised")


PACK_DENSE: dict[Format, Callable[[Tensor], Tensor]] = {
    Format.INT8: pack_int8,
    Format.Q4_1: pack_int4,
    Format.FLOAT8: pack_float8,
}
"""what quantises dense weights"""
