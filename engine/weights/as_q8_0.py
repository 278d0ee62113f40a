"""Blocks whose values Q8_0 holds exactly: five bits less 16 are an int8, and so are IQ4_NL's 16 levels and twice an
e2m1; scales stay, or are halved."""

from __future__ import annotations

import torch
from torch import Tensor

from engine.cpu_kernels.formats import Format
from engine.cpu_kernels.panel_parts import UNEVEN_LEVELS
from engine.weights.block_floats import mxfp4_as_q8_0


def as_q8_0(format: Format, rows: Tensor) -> Tensor | None:
    """uint8 [n, bytes of a row] → the same, 34 bytes for 32 inputs; None: the format has other values
    (`engine.cpu_kernels.formats.IN_EIGHT_BITS`), or a scale of these is beyond float16."""
    if format is Format.Q8_0:
        return rows
    if format is Format.MXFP4:
        found = mxfp4_as_q8_0(rows.view(len(rows), -1, 17))
        return None if found is None else found.flatten(1)
    if format is Format.Q5_0:
        blocks = rows.view(len(rows), -1, 22)
        fifth = (blocks[..., 2:6, None] >> torch.arange(8, dtype=torch.uint8)) & 1
        levels = (_nibbles(blocks[..., 6:]) | fifth.flatten(2) << 4) - 16  # wraps, as int8 bytes do
    elif format is Format.IQ4_NL:
        blocks = rows.view(len(rows), -1, 18)
        levels = torch.tensor(UNEVEN_LEVELS, dtype=torch.int8)[_nibbles(blocks[..., 2:]).int()].view(torch.uint8)
    else:
        return None
    return torch.cat((blocks[..., :2], levels), dim=2).flatten(1)


def _nibbles(packed: Tensor) -> Tensor:
    return torch.cat((packed & 15, packed >> 4), dim=2)
