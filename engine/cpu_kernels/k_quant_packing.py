"""The formats whose blocks are 256 inputs, eight groups of 32, as panels of 32 outputs and back.

Blocks: ggml's `ggml-common.h`, structs `block_q2_K` and so on. Panels: `csrc/linear.h`, `csrc/group_formats.h`.
"""

from __future__ import annotations

import torch
from torch import Tensor

from engine.cpu_kernels.formats import Format
from engine.cpu_kernels.panel_parts import (
    UNEVEN_LEVELS,
    GroupLayout,
    bit_values,
    blocks,
    by_input,
    by_output,
    field,
    half_values,
    halves,
    join,
    look_up,
    nibble_values,
    pair_bits,
    split_dim,
)

_SUB_GROUPS = 8


def _q2_k_to_panels(rows: Tensor) -> Tensor:
    each = blocks(rows, 84)
    return join(_two_bits(each, 16), _numbers(field(each, 0, 16)), halves(each, 80, 2))


def _q2_k_from_panels(groups: Tensor) -> Tensor:
    both = _of_halves(groups, 2048)
    scales = (both & 15).float().mul_(half_values(groups, 2560)[..., None, None])
    minima = (both >> 4).float().mul_(half_values(groups, 2624)[..., None, None])
    q = split_dim(_two_bit_values(groups, 0).float(), 4, (2, 16))
    return q.mul_(scales[..., None]).sub_(minima[..., None]).flatten(3)


def _q3_k_to_panels(rows: Tensor) -> Tensor:
    each = blocks(rows, 110)
    low = field(each, 96, 8)
    high = field(each, 104, 4)[..., None, :] >> torch.arange(0, 8, 2, dtype=torch.uint8)[:, None]
    scales = torch.cat((low & 15, low >> 4), dim=3) | (high.flatten(3) & 3) << 4
    scales = scales - 32  # wraps, as int8 bytes do
    return join(_two_bits(each, 32), by_input(_one_bit(each, 0)), _numbers(scales), halves(each, 108, 1))


def _q3_k_from_panels(groups: Tensor) -> Tensor:
    q = (_two_bit_values(groups, 0) | _bit_values(groups, 2048) << 2).float().sub_(4.0)
    scales = _of_halves(groups, 3072).view(torch.int8).float().mul_(half_values(groups, 3584)[..., None, None])
    return split_dim(q, 4, (2, 16)).mul_(scales[..., None]).flatten(3)


def _q4_k_to_panels(rows: Tensor) -> Tensor:
    each = blocks(rows, 144)
    return join(_neighbours(field(each, 16, 128)), *_six_bit_numbers(each), halves(each, 0, 2))


def _q4_k_from_panels(groups: Tensor) -> Tensor:
    return _above_minima(groups, _nibbles(groups), 4096)


def _q5_k_to_panels(rows: Tensor) -> Tensor:
    each = blocks(rows, 176)
    nibbles, fifth = _neighbours(field(each, 48, 128)), by_input(_one_bit(each, 16))
    return join(nibbles, fifth, *_six_bit_numbers(each), halves(each, 0, 2))


def _q5_k_from_panels(groups: Tensor) -> Tensor:
    return _above_minima(groups, _nibbles(groups) | _bit_values(groups, 4096) << 4, 5120)


def _q6_k_to_panels(rows: Tensor) -> Tensor:
    each = blocks(rows, 210)
    # Half a block: 64 bytes of low bits, whose nibbles are 64 inputs apart.
    first, last = split_dim(each[..., :128], 3, (2, 2, 2, 16)).unbind(
        5
    )  # [..., half, 32 inputs, first or last 16, byte]
    nibbles = torch.stack(((first & 15) | (last << 4), (first >> 4) | (last & 240)), dim=4).flatten(3, 5)
    numbers = _numbers(field(each, 192, 16))
    return join(by_input(nibbles.contiguous()), _two_bits(each, 128), numbers, halves(each, 208, 1))


def _q6_k_from_panels(groups: Tensor) -> Tensor:
    q = (_nibbles(groups) | _two_bit_values(groups, 4096) << 4).float().sub_(32.0)
    scales = _of_halves(groups, 6144).view(torch.int8).float().mul_(half_values(groups, 6656)[..., None, None])
    return split_dim(q, 4, (2, 16)).mul_(scales[..., None]).flatten(3)


def _iq4_xs_to_panels(rows: Tensor) -> Tensor:
    each = blocks(rows, 136)
    high = field(each, 2, 2)[..., None] >> torch.arange(0, 8, 2, dtype=torch.uint8)
    low = field(each, 4, 4)[..., None]
    scales = torch.cat((low & 15, low >> 4), dim=4).flatten(3) | (high.flatten(3) & 3) << 4
    nibbles = split_dim(field(each, 8, 128), 3, (_SUB_GROUPS, 16))
    return join(by_input(nibbles), _numbers(scales - 32), halves(each, 0, 1))


def _iq4_xs_from_panels(groups: Tensor) -> Tensor:
    scales = split_dim(field(groups, 4096, 256).view(torch.int8), 2, (_SUB_GROUPS, 32)).transpose(2, 3).float()
    scales = scales.mul_(half_values(groups, 4352)[..., None])
    return look_up(UNEVEN_LEVELS, _nibbles(groups)).mul_(scales[..., None]).flatten(3)


def _numbers(each: Tensor) -> Tensor:
    """One for each part of a block: uint8 [panels, 32, groups, parts] → [panels, groups, parts, 32]."""
    return each.permute(0, 2, 3, 1)


def _six_bit_numbers(each: Tensor) -> tuple[Tensor, Tensor]:
    """Scales and minima of Q4_K and Q5_K."""
    first, second, mixed = split_dim(each[..., 4:16], 3, (3, 4)).unbind(3)
    scales = torch.cat((first & 63, (mixed & 15) | ((first >> 2) & 48)), dim=3)
    minima = torch.cat((second & 63, (mixed >> 4) | ((second >> 2) & 48)), dim=3)
    return _numbers(scales), _numbers(minima)


def _neighbours(packed: Tensor) -> Tensor:
    """A block pairs inputs 32 apart in the nibbles of a byte; a panel pairs those 16 apart, within one group."""
    first, last = split_dim(packed, 3, (4, 2, 16)).unbind(4)
    even, odd = (first & 15) | (last << 4), (first >> 4) | (last & 240)
    return by_input(torch.stack((even, odd), dim=4).flatten(3, 4))


def _two_bits(each: Tensor, start: int) -> Tensor:
    """64 bytes of a block: of each half of it 32, which hold inputs 32 apart."""
    one, other = split_dim(field(each, start, 64), 3, (2, 2, 16)).unbind(4)
    pairs = [_interleave_bits(one >> shift, other >> shift) for shift in (0, 4)]
    return by_input(torch.stack(pairs, dim=4).flatten(3, 4).contiguous())


def _interleave_bits(first: Tensor, last: Tensor) -> Tensor:
    """Bits 0-1 and 2-3 of both: of group 2 h (first, last 16 inputs), then of group 2 h + 1."""
    return (first & 3) | ((last & 3) << 2) | ((first & 12) << 2) | ((last & 12) << 4)


def _one_bit(each: Tensor, start: int) -> Tensor:
    """32 bytes of a block, whose bits are inputs 32 apart → [..., 8, 4]."""
    bits = field(each, start, 32)[..., None, :] >> torch.arange(8, dtype=torch.uint8)[:, None]
    return pair_bits(bits & 1)


def _nibbles(groups: Tensor) -> Tensor:
    """uint8 [panels, groups, 32 outputs, 8, 32]"""
    return torch.stack([nibble_values(groups, 512 * sub) for sub in range(_SUB_GROUPS)], dim=3)


def _bit_values(groups: Tensor, start: int) -> Tensor:
    return torch.stack([bit_values(groups, start + 128 * sub) for sub in range(_SUB_GROUPS)], dim=3)


def _two_bit_values(groups: Tensor, start: int) -> Tensor:
    parts = []
    for sub in range(_SUB_GROUPS):
        bits = by_output(groups, start + 512 * (sub // 2), 16) >> (4 * (sub % 2))
        parts.append(torch.cat((bits & 3, (bits >> 2) & 3), dim=3))
    return torch.stack(parts, dim=3)


def _of_halves(groups: Tensor, start: int) -> Tensor:
    """A number for 16 inputs: uint8 [panels, groups, 32 outputs, 8, 2]."""
    return split_dim(field(groups, start, 512), 2, (_SUB_GROUPS, 2, 32)).permute(0, 1, 4, 2, 3)


def _above_minima(groups: Tensor, levels: Tensor, start: int) -> Tensor:
    """Levels with scales and minima for 32 inputs, which lie from byte `start` on."""
    count = _SUB_GROUPS * 32
    scales, minima = (
        split_dim(field(groups, start + at * count, count), 2, (_SUB_GROUPS, 32))
        .transpose(2, 3)
        .float()
        .mul_(half_values(groups, start + 2 * count + 64 * at)[..., None])
        for at in (0, 1)
    )
    return levels.float().mul_(scales[..., None]).sub_(minima[..., None]).flatten(3)


LAYOUTS: dict[Format, GroupLayout] = {
    Format.Q2_K: GroupLayout(256, 84, 2688, _q2_k_to_panels, _q2_k_from_panels),
    Format.Q3_K: GroupLayout(256, 110, 3648, _q3_k_to_panels, _q3_k_from_panels),
    Format.Q4_K: GroupLayout(256, 144, 4736, _q4_k_to_panels, _q4_k_from_panels),
    Format.Q5_K: GroupLayout(256, 176, 5760, _q5_k_to_panels, _q5_k_from_panels),
    Format.Q6_K: GroupLayout(256, 210, 6720, _q6_k_to_panels, _q6_k_from_panels),
    Format.IQ4_XS: GroupLayout(256, 136, 4416, _iq4_xs_to_panels, _iq4_xs_from_panels),
}
