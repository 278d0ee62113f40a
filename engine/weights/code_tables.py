"""4 bits that are numbers of a table's values, and 4 bits with what is added to their products: to floating point.

Sources: bitsandbytes' `dequantize_4bit` (nf4, fp4; Dettmers et al., QLoRA, section 3), torchao's `Int4Tensor`. Values
are computed in float32 in the order in which those compute them, and rounded once.
"""

from __future__ import annotations

import torch
from torch import Tensor


def dequantize_codes(packed: Tensor, table: Tensor, absmax: Tensor, block: int, destination: Tensor) -> None:
    """packed: uint8, the earlier of two weights in the high half; table: float32 [16]; absmax: float32, one for each
    `block` of the weights [n, k], row after row."""
    pairs = packed.flatten()
    codes = torch.stack((pairs >> 4, pairs & 15), dim=1).flatten()[: destination.numel()]
    scales = absmax.repeat_interleave(block)[: destination.numel()]
    destination.copy_(table[codes.int()].mul_(scales).view(destination.shape))


def nested_scales(codes: Tensor, table: Tensor, absmax: Tensor, block: int, offset: float) -> Tensor:
    """float32 of the shape of `codes`, uint8: double quantisation."""
    return table[codes.int()].mul_(absmax.repeat_interleave(block)[: codes.numel()]).add_(offset)


def dequantize_int4_sums(packed: Tensor, scale: Tensor, added: Tensor, destination: Tensor) -> None:
    """packed: int8 [n, k / 2], the earlier of two inputs in the low half, -8 to 7; scale, added: [groups, n]."""
    levels = torch.stack((packed << 4 >> 4, packed >> 4), dim=2).flatten(1).float()
    group = levels.shape[1] // len(scale)
    factors, sums = (each.t().float().repeat_interleave(group, dim=1) for each in (scale, added))
    destination.copy_(levels.mul_(factors).add_(sums))
