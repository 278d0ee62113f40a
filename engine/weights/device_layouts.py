"""How quantised matrices lie on a GPU: levels in one tensor and all numbers of their groups in another, by rows, so
that a tile of any kernel reads both in long runs. `engine.models.product_kernels.device_formats` reads them.

| format | levels of a row | scales of a row |
|---|---|---|
| INT8 | k int8 | one float32 |
| FLOAT8, and FLOAT8_BLOCK as it | k e4m3, as bytes | float32 for equal parts of k |
| Q8_0 | k int8 | a float16 for 32 inputs |
| Q4_0 | k / 2 bytes | the same |
| Q4_1, INT4_GROUP | the same | two float16 for 32 inputs: scale, then minimum or zero point |
| Q4_K | the same | for 256 inputs d, dmin, and 8 words of a scale and a minimum |
| Q6_K | k / 2 bytes, then k / 4 of the upper two bits | for 256 inputs d, and 8 words of two scales |

A byte of four-bit levels pairs inputs 16 apart in a group of 32; upper bits pair two groups. Float16 and words are
int16.
"""

from __future__ import annotations

import torch
from torch import Tensor

from engine.cpu_kernels import block_packing
from engine.cpu_kernels.formats import PANEL, Format
from engine.cpu_kernels.quantize import float8_rows, pack_int4
from engine.models.product_kernels import Matrix
from engine.weights.source import EncodedRows

_INT8_LEVELS = 127.0


def arranged(encoded: EncodedRows) -> Matrix:
    """Blocks of a checkpoint (`EncodedRows`), the same values bit for bit."""
    if encoded.format is Format.FLOAT8:
        levels, scales = encoded.rows[:, :-4], encoded.rows[:, -4:].contiguous()
        return Matrix(levels.contiguous(), scales.view(torch.float32), int(Format.FLOAT8))
    layout = block_packing.LAYOUTS[encoded.format]
    blocks = encoded.rows.view(encoded.rows.shape[0], -1, layout.block_bytes)
    match encoded.format:
        case Format.FLOAT8_BLOCK:
            scales = blocks[..., 128:].contiguous().view(torch.float32).flatten(1)
            return Matrix(blocks[..., :128].flatten(1), scales, int(Format.FLOAT8))
        case Format.Q4_K:
            levels, scales = _q4_k(blocks)
        case Format.Q6_K:
            levels, scales = _q6_k(blocks)
        case Format.Q4_0 | Format.Q4_1 | Format.Q8_0 | Format.INT4_GROUP as format:
            heads = 4 if format in (Format.Q4_1, Format.INT4_GROUP) else 2
            levels, scales = blocks[..., heads:].flatten(1), _words(blocks[..., :heads])
            levels = levels.view(torch.int8) if format is Format.Q8_0 else levels
        case _:
            raise ValueError(f"no kernel of GPUs multiplies {encoded.format.name}")
    return Matrix(levels.contiguous(), scales.flatten(1).contiguous(), int(encoded.format))


def int8(weight: Tensor) -> Matrix:
    """[n, k] of any float dtype, k a multiple of 32. Raises ValueError: a weight is not finite."""
    wide = weight.float()
    largest = wide.abs().amax(1, keepdim=True)
    if not bool(largest.isfinite().all()):
        raise ValueError("a weight is not finite, so the matrix cannot be quantised")
    scales = largest / _INT8_LEVELS
    levels = (wide / scales.where(scales > 0, 1.0)).round_().clamp_(-_INT8_LEVELS, _INT8_LEVELS)
    return Matrix(levels.to(torch.int8), scales, int(Format.INT8))


def int4(weight: Tensor) -> Matrix:
    """[n, k] of any float dtype, k a multiple of 32, as Q4_1: levels as CPUs have them (`pack_int4`)."""
    n, k = weight.shape
    groups = pack_int4(weight).view(-1, k // 32, 640)
    nibbles = groups[..., :512].reshape(len(groups), -1, 4, PANEL, 4).permute(0, 3, 1, 2, 4)
    scales = groups[..., 512:].contiguous().view(torch.int16).view(len(groups), -1, 2, PANEL).permute(0, 3, 1, 2)
    levels, scales = (part.reshape(len(groups) * PANEL, -1)[:n].contiguous() for part in (nibbles, scales))
    return Matrix(levels, scales, int(Format.Q4_1))


def float8(weight: Tensor) -> Matrix:
    """[n, k] of any float dtype, k a multiple of 32. Raises ValueError: a weight is not finite."""
    return arranged(EncodedRows(Format.FLOAT8, float8_rows(weight)))


MADE = {Format.INT8: int8, Format.Q4_1: int4, Format.FLOAT8: float8}
"""what quantises dense weights"""


def _words(values: Tensor) -> Tensor:
    """uint8 [..., 2 i] → int16 [..., i]"""
    return values.contiguous().view(torch.int16)


def _nibbles(first: Tensor, last: Tensor) -> tuple[Tensor, Tensor]:
    """Bytes whose halves are of two groups, of the first and of the last 16 inputs of both → bytes of each group."""
    return (first & 15) | (last << 4), (first >> 4) | (last & 240)


def _q4_k(blocks: Tensor) -> tuple[Tensor, Tensor]:
    rows, count, _ = blocks.shape
    first, second, mixed = blocks[..., 4:16].reshape(rows, count, 3, 4).unbind(2)
    of_groups = torch.cat((first & 63, (mixed & 15) | ((first >> 2) & 48)), dim=2)
    minima = torch.cat((second & 63, (mixed >> 4) | ((second >> 2) & 48)), dim=2)
    pairs = torch.stack((of_groups, minima), dim=3).flatten(2)
    groups = _nibbles(*blocks[..., 16:].reshape(rows, count, 4, 2, 16).unbind(3))
    levels = torch.stack(groups, dim=3)  # [rows, blocks, 4, 2, 16]: neighbours in a byte are neighbouring groups
    return levels.flatten(1), torch.cat((_words(blocks[..., :4]), _words(pairs)), dim=2)


def _q6_k(blocks: Tensor) -> tuple[Tensor, Tensor]:
    rows, count, _ = blocks.shape
    # Half a block: 64 bytes of low bits, whose nibbles are two groups apart; 32 bytes of upper bits of four groups.
    low = torch.stack(_nibbles(*blocks[..., :128].reshape(rows, count, 2, 2, 2, 16).unbind(4)), dim=3)
    first, last = blocks[..., 128:192].reshape(rows, count, 2, 1, 2, 16).unbind(4)
    shift = torch.tensor([0, 4], dtype=torch.uint8)[:, None]
    first, last = first >> shift, last >> shift  # [rows, blocks, 2 halves, 2 pairs of groups, 16]
    upper = (first & 3) | ((last & 3) << 2) | ((first & 12) << 2) | ((last & 12) << 4)
    scales = torch.cat((_words(blocks[..., 208:210]), _words(blocks[..., 192:208])), dim=2)
    return torch.cat((low.flatten(1), upper.flatten(1)), dim=1), scales
