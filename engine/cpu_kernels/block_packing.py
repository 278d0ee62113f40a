"""Blocks as panels of 32 outputs and back: a permutation of bytes for each encoding, and what the bytes mean.

Blocks: ggml's `ggml-common.h`, structs `block_q4_0` and so on; that of INT4_GROUP is Q4_1's with a zero point in the
place of the minimum. Panels: `csrc/linear.h`, `csrc/group_formats.h`.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from engine.cpu_kernels.formats import PANEL, Format

_SUB_GROUPS = 8  # of 32 inputs, in the 256 of a K-quant


@dataclass(frozen=True)
class GroupLayout:
    """`inputs` of a block, `block_bytes` of it in a file, `panel_bytes` of the 32 outputs' blocks together.

    `to_panels`: uint8 [panels, 32, bytes of a row] → uint8 [panels, ...]. `from_panels`: uint8 [panels, groups,
    panel_bytes] → float32 [panels, groups, 32 outputs, inputs].
    """

    inputs: int
    block_bytes: int
    panel_bytes: int
    to_panels: Callable[[Tensor], Tensor]
    from_panels: Callable[[Tensor], Tensor]


def split_dim(x: Tensor, dim: int, sizes: tuple[int, ...]) -> Tensor:
    return x.view(*x.shape[:dim], *sizes, *x.shape[dim + 1 :])


def by_input(values: Tensor) -> Tensor:
    """uint8 [panels, 32, ..., 4 i] → int32 [panels, ..., i, 32]: four inputs of every output side by side."""
    return values.view(torch.int32).movedim(1, -1)


def join(*parts: Tensor) -> Tensor:
    """Parts [panels, groups, ...] of any dtype → uint8 [panels, groups, bytes], one after another."""
    return torch.cat([part.contiguous().flatten(2).view(torch.uint8) for part in parts], dim=2)


def _blocks(rows: Tensor, size: int) -> Tensor:
    return split_dim(rows, 2, (-1, size))


def _field(blocks: Tensor, start: int, size: int) -> Tensor:
    return blocks[..., start : start + size].contiguous()


def _halves(blocks: Tensor, start: int, count: int) -> Tensor:
    """float16 numbers of each block, as bits: uint8 [panels, 32, groups, bytes] → int16 [panels, groups, count, 32]."""
    return _field(blocks, start, 2 * count).view(torch.int16).permute(0, 2, 3, 1)


def _half_values(groups: Tensor, start: int) -> Tensor:
    """32 float16 at byte `start` → float32 [panels, groups, 32 outputs]."""
    return _field(groups, start, 2 * PANEL).view(torch.float16).float()


def _by_output(groups: Tensor, start: int, inputs: int) -> Tensor:
    """The opposite of `by_input`: uint8 [panels, groups, 32 outputs, inputs]."""
    packed = split_dim(_field(groups, start, inputs * PANEL), 2, (inputs // 4, PANEL, 4))
    return packed.transpose(2, 3).flatten(3)


def _nibble_values(groups: Tensor, start: int) -> Tensor:
    packed = _by_output(groups, start, 16)
    return torch.cat((packed & 15, packed >> 4), dim=3)


def _four_bits(second: Literal["none", "minimum", "zero"]) -> GroupLayout:
    """`second`: what the second half of a block is."""
    numbers = 1 if second == "none" else 2
    size = 2 * numbers + 16

    def to_panels(rows: Tensor) -> Tensor:
        blocks = _blocks(rows, size)
        return join(by_input(_field(blocks, 2 * numbers, 16)), _halves(blocks, 0, numbers))

    def from_panels(groups: Tensor) -> Tensor:
        q, d = _nibble_values(groups, 0).float(), _half_values(groups, 512)[..., None]
        if second == "none":
            return q.sub_(8.0).mul_(d)
        other = _half_values(groups, 576)[..., None]
        return q.mul_(d).add_(other) if second == "minimum" else q.sub_(other).mul_(d)

    return GroupLayout(32, size, 512 + 64 * numbers, to_panels, from_panels)


def _q8_0_to_panels(rows: Tensor) -> Tensor:
    blocks = _blocks(rows, 34)
    return join(by_input(_field(blocks, 2, 32)), _halves(blocks, 0, 1))


def _q8_0_from_panels(groups: Tensor) -> Tensor:
    return _by_output(groups, 0, 32).view(torch.int8).float().mul_(_half_values(groups, 1024)[..., None])


def _q4_k_to_panels(rows: Tensor) -> Tensor:
    blocks = _blocks(rows, 144)
    first, second, mixed = split_dim(blocks[..., 4:16], 3, (3, 4)).unbind(3)
    scales = torch.cat((first & 63, (mixed & 15) | ((first >> 2) & 48)), dim=3)
    minima = torch.cat((second & 63, (mixed >> 4) | ((second >> 2) & 48)), dim=3)
    # A block pairs inputs 32 apart in the nibbles of a byte; a panel pairs those 16 apart, within one sub-group.
    first, last = split_dim(blocks[..., 16:], 3, (4, 2, 16)).unbind(4)
    even, odd = (first & 15) | (last << 4), (first >> 4) | (last & 240)
    nibbles = torch.stack((even, odd), dim=4).flatten(3, 4)
    scales, minima = (part.permute(0, 2, 3, 1) for part in (scales, minima))
    return join(by_input(nibbles), scales, minima, _halves(blocks, 0, 2))


def _q4_k_from_panels(groups: Tensor) -> Tensor:
    scales = split_dim(_field(groups, 4096, 256), 2, (8, 32)).float().mul_(_half_values(groups, 4608)[:, :, None])
    minima = split_dim(_field(groups, 4352, 256), 2, (8, 32)).float().mul_(_half_values(groups, 4672)[:, :, None])
    q = torch.stack([_nibble_values(groups, 512 * sub) for sub in range(_SUB_GROUPS)], dim=3).float()
    return q.mul_(scales.transpose(2, 3)[..., None]).sub_(minima.transpose(2, 3)[..., None]).flatten(3)


def _q6_k_to_panels(rows: Tensor) -> Tensor:
    blocks = _blocks(rows, 210)
    # Half a block: 64 bytes of low bits, whose nibbles are 64 inputs apart; 32 bytes of high bits of inputs 32 apart.
    low = split_dim(blocks[..., :128], 3, (2, 2, 2, 16))  # [..., half, 32 inputs, first or last 16, byte]
    high = split_dim(blocks[..., 128:192], 3, (2, 2, 16))
    first, last = low.unbind(5)
    nibbles = torch.stack(((first & 15) | (last << 4), (first >> 4) | (last & 240)), dim=4).flatten(3, 5)
    one, other = high.unbind(4)
    pairs = [_interleave_bits(one >> shift, other >> shift) for shift in (0, 4)]
    bits = torch.stack(pairs, dim=4).flatten(3, 4)
    scales = blocks[..., 192:208].permute(0, 2, 3, 1)
    return join(by_input(nibbles.contiguous()), by_input(bits.contiguous()), scales, _halves(blocks, 208, 1))


def _interleave_bits(first: Tensor, last: Tensor) -> Tensor:
    """Bits 0-1 and 2-3 of both: of sub-group 2 h (first, last 16 inputs), then of sub-group 2 h + 1."""
    return (first & 3) | ((last & 3) << 2) | ((first & 12) << 2) | ((last & 12) << 4)


def _q6_k_from_panels(groups: Tensor) -> Tensor:
    subs = []
    for sub in range(_SUB_GROUPS):
        low = _nibble_values(groups, 512 * sub)
        bits = _by_output(groups, 4096 + 512 * (sub // 2), 16) >> (4 * (sub % 2))
        high = torch.cat((bits & 3, (bits >> 2) & 3), dim=3)
        subs.append(low | (high << 4))
    q = split_dim(torch.stack(subs, dim=3).float().sub_(32.0), 4, (2, 16))
    scales = split_dim(_field(groups, 6144, 512).view(torch.int8), 2, (8, 2, 32)).permute(0, 1, 4, 2, 3).float()
    scales = scales.mul_(_half_values(groups, 6656)[..., None, None])
    return q.mul_(scales[..., None]).flatten(3)


LAYOUTS: dict[Format, GroupLayout] = {
    Format.Q4_0: _four_bits("none"),
    Format.Q4_1: _four_bits("minimum"),
    Format.Q8_0: GroupLayout(32, 34, 1088, _q8_0_to_panels, _q8_0_from_panels),
    Format.Q4_K: GroupLayout(256, 144, 4736, _q4_k_to_panels, _q4_k_from_panels),
    Format.Q6_K: GroupLayout(256, 210, 6720, _q6_k_to_panels, _q6_k_from_panels),
    Format.INT4_GROUP: _four_bits("zero"),
}
