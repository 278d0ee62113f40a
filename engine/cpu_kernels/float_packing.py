"""Floats of four and eight bits as panels of 32 outputs and back.

Blocks of MXFP4 are two of ggml's `block_mxfp4`; rows of the others are made by `engine.weights.block_floats`. Panels:
`csrc/linear.h`, `csrc/group_formats.h`.
"""

from __future__ import annotations

import torch
from torch import Tensor

from engine.cpu_kernels.formats import PANEL, Format
from engine.cpu_kernels.panel_parts import (
    GroupLayout,
    blocks,
    by_input,
    by_output,
    field,
    join,
    look_up,
    nibble_values,
    split_dim,
)

_E2M1 = (0, 0.5, 1, 1.5, 2, 3, 4, 6, 0, -0.5, -1, -1.5, -2, -3, -4, -6)


def _mxfp4_to_panels(rows: Tensor) -> Tensor:
    each = split_dim(blocks(rows, 34), 3, (2, 17))
    return join(by_input(each[..., 1:].flatten(3).contiguous()), each[..., 0].permute(0, 2, 3, 1))


def _mxfp4_from_panels(groups: Tensor) -> Tensor:
    q = torch.stack([look_up(_E2M1, nibble_values(groups, 512 * sub)) for sub in range(2)], dim=3)
    exponents = split_dim(field(groups, 1024, 64), 2, (2, PANEL)).transpose(2, 3).to(torch.int32) << 23
    powers = torch.where(exponents == 0, 1 << 22, exponents).view(torch.float32)  # the lowest is a subnormal float
    return q.mul_(powers[..., None]).flatten(3)


def _nvfp4_to_panels(rows: Tensor) -> Tensor:
    each = blocks(rows, 18)
    return join(by_input(field(each, 2, 16)), each[..., :2].permute(0, 2, 3, 1))


def _nvfp4_from_panels(groups: Tensor) -> Tensor:
    scales = split_dim(field(groups, 512, 64).view(torch.float8_e4m3fn).float(), 2, (2, PANEL))
    total = _floats(groups, 576)[:, :, None]
    factors = torch.where(total == 0, 0.0, scales / total).transpose(2, 3)  # outputs that pad a panel have zeros
    return split_dim(look_up(_E2M1, nibble_values(groups, 0)), 3, (2, 16)).mul_(factors[..., None]).flatten(3)


def _float8_to_panels(rows: Tensor) -> Tensor:
    return join(by_input(blocks(rows, 4)))


def _float8_from_panels(groups: Tensor) -> Tensor:
    return _e4m3_values(groups, 4).mul_(_floats(groups, 128)[..., None])


def _float8_block_to_panels(rows: Tensor) -> Tensor:
    each = blocks(rows, 132)
    return join(by_input(field(each, 0, 128)), by_input(field(each, 128, 4)))


def _float8_block_from_panels(groups: Tensor) -> Tensor:
    return _e4m3_values(groups, 128).mul_(_floats(groups, 4096)[..., None])


def _e4m3_values(groups: Tensor, inputs: int) -> Tensor:
    return by_output(groups, 0, inputs).view(torch.float8_e4m3fn).float()


def _floats(groups: Tensor, start: int) -> Tensor:
    """32 float32 at byte `start`: [panels, groups, 32 outputs]."""
    return field(groups, start, 4 * PANEL).view(torch.float32)


LAYOUTS: dict[Format, GroupLayout] = {
    Format.MXFP4: GroupLayout(64, 34, 1088, _mxfp4_to_panels, _mxfp4_from_panels),
    Format.NVFP4: GroupLayout(32, 18, 576, _nvfp4_to_panels, _nvfp4_from_panels, tail_bytes=4),
    Format.FLOAT8: GroupLayout(4, 4, 128, _float8_to_panels, _float8_from_panels, tail_bytes=4),
    Format.FLOAT8_BLOCK: GroupLayout(128, 132, 4224, _float8_block_to_panels, _float8_block_from_panels),
}
