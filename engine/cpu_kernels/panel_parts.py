"""What panels of 32 outputs are made of, from blocks and back: bytes of four inputs of each output side by side, bits
and float16 numbers of each output. Panels: `csrc/linear.h`, `csrc/group_formats.h`."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from engine.cpu_kernels.formats import PANEL

UNEVEN_LEVELS = (-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113)
"""what the nibbles of IQ4_NL and IQ4_XS stand for"""


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
    tail_bytes: int = 0
    """behind the blocks of a row; those of 32 rows lie behind a panel's groups, and `from_panels` gets them behind each
    of those"""


def split_dim(x: Tensor, dim: int, sizes: tuple[int, ...]) -> Tensor:
    return x.view(*x.shape[:dim], *sizes, *x.shape[dim + 1 :])


def by_input(values: Tensor) -> Tensor:
    """uint8 [panels, 32, ..., 4 i] → int32 [panels, ..., i, 32]: four inputs of every output side by side."""
    return values.view(torch.int32).movedim(1, -1)


def join(*parts: Tensor) -> Tensor:
    """Parts [panels, groups, ...] of any dtype → uint8 [panels, groups, bytes], one after another."""
    return torch.cat([part.contiguous().flatten(2).view(torch.uint8) for part in parts], dim=2)


def blocks(rows: Tensor, size: int) -> Tensor:
    return split_dim(rows, 2, (-1, size))


def field(blocks: Tensor, start: int, size: int) -> Tensor:
    return blocks[..., start : start + size].contiguous()


def halves(blocks: Tensor, start: int, count: int) -> Tensor:
    """float16 numbers of each block, as bits: uint8 [panels, 32, groups, bytes] → int16 [panels, groups, count, 32]."""
    return field(blocks, start, 2 * count).view(torch.int16).permute(0, 2, 3, 1)


def half_values(groups: Tensor, start: int) -> Tensor:
    """32 float16 at byte `start` → float32 [panels, groups, 32 outputs]."""
    return field(groups, start, 2 * PANEL).view(torch.float16).float()


def by_output(groups: Tensor, start: int, inputs: int) -> Tensor:
    """The opposite of `by_input`: uint8 [panels, groups, 32 outputs, inputs]."""
    packed = split_dim(field(groups, start, inputs * PANEL), 2, (inputs // 4, PANEL, 4))
    return packed.transpose(2, 3).flatten(3)


def nibble_values(groups: Tensor, start: int) -> Tensor:
    packed = by_output(groups, start, 16)
    return torch.cat((packed & 15, packed >> 4), dim=3)


def pair_bits(bits: Tensor) -> Tensor:
    """uint8 0 or 1 [..., groups of 32 inputs, 32] → [..., groups, 4]: of input 4 i + j in bit i of byte j."""
    planes = bits.reshape(*bits.shape[:-1], 8, 4) << torch.arange(8, dtype=torch.uint8)[:, None]
    return planes.sum(-2, dtype=torch.uint8)


def bit_values(groups: Tensor, start: int) -> Tensor:
    """The opposite, of 32 inputs at byte `start`: uint8 [panels, groups, 32 outputs, 32]."""
    planes = by_output(groups, start, 4)[..., None, :] >> torch.arange(8, dtype=torch.uint8)[:, None]
    return (planes & 1).flatten(3)


def look_up(table: Sequence[float], levels: Tensor) -> Tensor:
    """float32 of the same shape."""
    return torch.tensor(table, dtype=torch.float32)[levels.int()]
