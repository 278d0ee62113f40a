"""Floating point of 8 and 4 bits with scales for blocks of weights: to wider floating point, and e2m1 with a power of
two for 32 inputs to int8 with such a scale, which holds the same values.

Sources: OCP Microscaling Formats 1.0 (e2m1, e8m0); DeepSeek-V3's `weight_dequant` (blocks of 128 x 128); compressors of
compressed-tensors. Values are computed in float32 in the order in which those compute them, and rounded once.
"""

from __future__ import annotations

import torch
from torch import Tensor

from engine.cpu_kernels.formats import Format
from engine.weights.source import EncodedRows

_ELEMENTS_AT_ONCE = 1 << 20
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
    _dequantize_e2m1(packed, _powers(scale), destination)


def is_finite_e8m0(scale: Tensor) -> bool:
    return not bool((scale.view(torch.uint8) == _NOT_A_NUMBER).any())


def mxfp4_as_q8_0(packed: Tensor, scale: Tensor) -> EncodedRows | None:
    """The same values, bit for bit: twice an e2m1 is a whole number of at most 12. None: a scale is beyond float16."""
    return _as_q8_0(_twice(packed).view(len(packed), -1, 32), scale)


def gguf_mxfp4_as_q8_0(rows: Tensor) -> EncodedRows | None:
    """The same of a GGUF file's blocks (ggml's `block_mxfp4`): a scale, then inputs 16 apart in the halves of bytes."""
    blocks = rows.view(len(rows), -1, 17)
    levels = torch.cat((blocks[..., 1:] & 15, blocks[..., 1:] >> 4), dim=2)
    return _as_q8_0(_table()[levels.int()], blocks[..., 0])


def _as_q8_0(levels: Tensor, scale: Tensor) -> EncodedRows | None:
    """levels: int8 [n, groups, 32]; scale: e8m0 of twice as much."""
    powers = torch.where(levels.any(dim=2), _powers(scale) / 2, 0.0)  # zeros may have any scale
    halves = powers.half()
    if not torch.equal(halves.float(), powers) or not bool(halves.isfinite().all()):
        return None
    blocks = torch.cat((halves[..., None].view(torch.uint8), levels.view(torch.uint8)), dim=2)
    return EncodedRows(Format.Q8_0, blocks.flatten(1))


def _powers(scale: Tensor) -> Tensor:
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
