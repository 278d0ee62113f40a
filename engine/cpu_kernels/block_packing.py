"""Blocks as panels of 32 outputs and back: a permutation of bits for each encoding, and what they mean.

Blocks: ggml's `ggml-common.h`, structs `block_q4_0` and so on; that of INT4_GROUP is Q4_1's with a zero point in the
place of the minimum. Panels: `csrc/linear.h`, `csrc/group_formats.h`.
"""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor

from engine.cpu_kernels import float_packing, k_quant_packing
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
)


def _four_bits(second: Literal["none", "minimum", "zero", "uneven"]) -> GroupLayout:
    """`second`: what the second half of a block is; uneven: there is none, and levels stand for the table's values."""
    numbers = 2 if second in ("minimum", "zero") else 1
    size = 2 * numbers + 16

    def to_panels(rows: Tensor) -> Tensor:
        each = blocks(rows, size)
        return join(by_input(field(each, 2 * numbers, 16)), halves(each, 0, numbers))

    def from_panels(groups: Tensor) -> Tensor:
        levels, d = nibble_values(groups, 0), half_values(groups, 512)[..., None]
        if second == "uneven":
            return look_up(UNEVEN_LEVELS, levels).mul_(d)
        q = levels.float()
        if second == "none":
            return q.sub_(8.0).mul_(d)
        other = half_values(groups, 576)[..., None]
        return q.mul_(d).add_(other) if second == "minimum" else q.sub_(other).mul_(d)

    return GroupLayout(32, size, 512 + 64 * numbers, to_panels, from_panels)


def _five_bits(numbers: int) -> GroupLayout:
    """`numbers`: 1, a scale; 2, a scale and a minimum."""
    size = 2 * numbers + 20

    def to_panels(rows: Tensor) -> Tensor:
        each = blocks(rows, size)
        fifth = field(each, 2 * numbers, 4)[..., None] >> torch.arange(8, dtype=torch.uint8)
        bits = pair_bits((fifth & 1).flatten(3))
        return join(by_input(field(each, 2 * numbers + 4, 16)), by_input(bits), halves(each, 0, numbers))

    def from_panels(groups: Tensor) -> Tensor:
        q = (nibble_values(groups, 0) | bit_values(groups, 512) << 4).float()
        d = half_values(groups, 640)[..., None]
        return q.sub_(16.0).mul_(d) if numbers == 1 else q.mul_(d).add_(half_values(groups, 704)[..., None])

    return GroupLayout(32, size, 640 + 64 * numbers, to_panels, from_panels)


def _q8_0_to_panels(rows: Tensor) -> Tensor:
    each = blocks(rows, 34)
    return join(by_input(field(each, 2, 32)), halves(each, 0, 1))


def _q8_0_from_panels(groups: Tensor) -> Tensor:
    return by_output(groups, 0, 32).view(torch.int8).float().mul_(half_values(groups, 1024)[..., None])


LAYOUTS: dict[Format, GroupLayout] = {
    Format.Q4_0: _four_bits("none"),
    Format.Q4_1: _four_bits("minimum"),
    Format.Q8_0: GroupLayout(32, 34, 1088, _q8_0_to_panels, _q8_0_from_panels),
    Format.INT4_GROUP: _four_bits("zero"),
    Format.Q5_0: _five_bits(1),
    Format.Q5_1: _five_bits(2),
    Format.IQ4_NL: _four_bits("uneven"),
    **k_quant_packing.LAYOUTS,
    **float_packing.LAYOUTS,
}
