"""Floating point of 8 and 4 bits with scales for blocks of weights: to wider floating point, or to rows that run packed
(`engine.cpu_kernels.float_packing`), the same values bit for bit.

Sources: OCP Microscaling Formats 1.0 (e2m1, e8m0); DeepSeek-V3's `weight_dequant` (blocks of 128 x 128); compressors of
compressed-tensors. Values are computed in float32 in the order in which those compute them, and rounded once.
"""

from __future__ import annotations

import torch
from torch import Tensor

from engine.cpu_kernels.formats import Format
from engine.weights.source import EncodedRows

_ELEMENTS_AT_ONCE = 1 << 20
_FLOAT8_GROUP = 128
_FLOAT8_SCALE_END = 2.0**120
"""kernels multiply scales by 256"""
_TWICE_E2M1 = (0, 1, 2, 3, 4, 6, 8, 12)
_NOT_A_NUMBER = 255


def dequantize_float8(weight: Tensor, scale: Tensor, block: tuple[int, int], destination: Tensor) -> None:
    """weight: float8 [n, k]; scale: one, one an output ([n] or [n, 1]), or one for a `block` of outputs and inputs."""
    n, k = weight.shape
    scale = scale.float()
    high, wide = block
    if scale.numel() == 1:
        high, wide, scale = n, k, scale.view(1, 1)
    elif scale.numel() == n and scale.shape in ((n,), (n, 1)):
        high, wide, scale = 1, k, scale.view(n, 1)
    run = max(1, _ELEMENTS_AT_ONCE // k)
    rows_of = torch.arange(n) // high
    for start in range(0, n, run):
        rows = slice(start, start + run)
        factors = scale[rows_of[rows]]
        if factors.shape[1] > 1:
            factors = factors.repeat_interleave(wide, dim=1)[:, :k]
        destination[rows].copy_(weight[rows].float().mul_(factors))


def dequantize_nvfp4(packed: Tensor, scale: Tensor, global_scale: Tensor, destination: Tensor) -> None:
    """packed: uint8 [n, k / 2], the earlier of two inputs in the low half; scale: float8 [n, k / 16], which is to be
    divided by `global_scale`."""
    factors = scale.float() / global_scale.float().view(1, 1)
    _dequantize_e2m1(packed, factors, destination)


def dequantize_mxfp4(packed: Tensor, scale: Tensor, destination: Tensor) -> None:
    """packed: as above; scale: [n, k / 32], exponents of two with a bias of 127 (e8m0)."""
    _dequantize_e2m1(packed, powers(scale), destination)


def is_finite_e8m0(scale: Tensor) -> bool:
    return not bool((scale.view(torch.uint8) == _NOT_A_NUMBER).any())


def encoded_float8(weight: Tensor, scale: Tensor, block: tuple[int, int]) -> EncodedRows | str:
    """As `dequantize_float8` takes them, of e4m3, or why they cannot be: a row is its bytes and a float32, or for each
    128 inputs those and a float32."""
    n, k = weight.shape
    bytes = weight.view(torch.uint8)
    if bool((bytes & 127 == 127).any()):
        return "they hold NaN"
    if not bool((scale.float().abs() < _FLOAT8_SCALE_END).all()):
        return "their scales are huge"
    high, wide = block
    if scale.numel() == 1:
        high, scale = n, scale.view(1, 1)
    elif scale.shape in ((n,), (n, 1)):
        high, scale = 1, scale.view(n, 1)
    factors = scale.float().repeat_interleave(high, dim=0)[:n]
    if factors.shape[1] == 1:
        if k % 4:
            return "their inputs are no multiple of 4"
        return EncodedRows(Format.FLOAT8, torch.cat((bytes, factors.view(torch.uint8)), dim=1))
    if wide % _FLOAT8_GROUP or k % _FLOAT8_GROUP:
        return f"their blocks or inputs are no multiple of {_FLOAT8_GROUP}"
    of_groups = factors.repeat_interleave(wide // _FLOAT8_GROUP, dim=1)[:, : k // _FLOAT8_GROUP, None]
    rows = torch.cat((bytes.view(n, -1, _FLOAT8_GROUP), of_groups.contiguous().view(torch.uint8)), dim=2)
    return EncodedRows(Format.FLOAT8_BLOCK, rows.flatten(1))


def encoded_nvfp4(packed: Tensor, scale: Tensor, global_scale: Tensor) -> EncodedRows | str:
    """As `dequantize_nvfp4` takes them: a row is blocks of two scales and 32 inputs, and a float32."""
    n, groups = scale.shape
    if groups % 2:
        return "their inputs are no multiple of 32"
    scales = scale.view(torch.uint8).view(n, -1, 2)
    blocks = torch.cat((scales, _sixteen_apart(packed)), dim=2).flatten(1)
    total = global_scale.float().reshape(1, 1).expand(n, 1).contiguous().view(torch.uint8)
    return EncodedRows(Format.NVFP4, torch.cat((blocks, total), dim=1))


def encoded_mxfp4(packed: Tensor, scale: Tensor) -> EncodedRows:
    """As `dequantize_mxfp4` takes them: ggml's blocks, `block_mxfp4`."""
    blocks = torch.cat((scale.view(torch.uint8)[..., None], _sixteen_apart(packed)), dim=2)
    return EncodedRows(Format.MXFP4, blocks.flatten(1))


def mxfp4_as_q8_0(blocks: Tensor) -> Tensor | None:
    """uint8 [n, groups, 17] → [n, groups, 34], the same values, bit for bit: twice an e2m1 is a whole number. None: a
    scale is beyond float16."""
    levels = _table()[torch.cat((blocks[..., 1:] & 15, blocks[..., 1:] >> 4), dim=2).int()]
    halved = torch.where(levels.any(dim=2), powers(blocks[..., 0]) / 2, 0.0)  # zeros may have any scale
    halves = halved.half()
    if not torch.equal(halves.float(), halved) or not bool(halves.isfinite().all()):
        return None
    return torch.cat((halves[..., None].view(torch.uint8), levels.view(torch.uint8)), dim=2)


def _sixteen_apart(packed: Tensor) -> Tensor:
    """[n, k / 2], neighbours in a byte → [n, k / 32, 16], as a block pairs inputs."""
    first, last = packed.view(len(packed), -1, 2, 8).unbind(2)
    return torch.stack(((first & 15) | (last << 4), (first >> 4) | (last & 240)), dim=3).flatten(2)


def powers(scale: Tensor) -> Tensor:
    """As float32, whose exponents have the same bias; the lowest is one of its subnormal numbers."""
    bits = scale.view(torch.uint8).to(torch.int32) << 23
    return torch.where(bits == 0, 1 << 22, bits).view(torch.float32)


def _twice(packed: Tensor) -> Tensor:
    """uint8 [n, bytes] → int8 [n, 2 * bytes]: twice the values."""
    both = torch.stack((packed & 15, packed >> 4), dim=2).flatten(1)
    return _table()[both.int()]


def _table() -> Tensor:
    return torch.tensor([*_TWICE_E2M1, *(-value for value in _TWICE_E2M1)], dtype=torch.int8)


def _dequantize_e2m1(packed: Tensor, factors: Tensor, destination: Tensor) -> None:
    n, k = destination.shape
    group = k // factors.shape[1]
    run = max(1, _ELEMENTS_AT_ONCE // k)
    for start in range(0, n, run):
        rows = slice(start, start + run)
        values = _twice(packed[rows]).float().mul_(0.5)
        destination[rows].copy_(values.mul_(factors[rows].repeat_interleave(group, dim=1)))
