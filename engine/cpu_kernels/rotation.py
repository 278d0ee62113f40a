"""Rows turned by a Hadamard matrix before they are quantised, so that no single input decides the scale of all.

An outlier among 64 inputs is spread over all of them; weights that are turned in the same way leave the product as it
was (QuaRot, Ashkboos et al. 2024). `csrc/hadamard.h` is the same for activations.
"""

from __future__ import annotations

import torch
from torch import Tensor

ROTATED = 64
"""inputs that are turned together; fewer at the end of a row are as much enlarged, and stay as they are but for that"""
_ENLARGED = ROTATED**0.5


def rotate(rows: Tensor) -> Tensor:
    """rows: float [..., k] → the same shape: the Walsh-Hadamard transform of every whole 64 inputs, not normalised,
    which enlarges them by 8, and 8 times the rest, for all share a scale. Bit for bit what `csrc/hadamard.h` computes
    in float32."""
    whole = rows.shape[-1] // ROTATED * ROTATED
    blocks = rows[..., :whole].reshape(-1, ROTATED)
    distance = 1
    while distance < ROTATED:
        low, high = blocks.view(-1, ROTATED // (2 * distance), 2, distance).unbind(2)
        blocks = torch.stack((low + high, low - high), dim=2).view(-1, ROTATED)
        distance *= 2
    return _with_rest(rows, blocks, _ENLARGED)


def rotate_back(rows: Tensor) -> Tensor:
    """The inverse of `rotate` (to a rounding of the dtype), as one matrix product: for whole weights."""
    whole = rows.shape[-1] // ROTATED * ROTATED
    inverse = rotate(torch.eye(ROTATED, dtype=rows.dtype)) / ROTATED
    return _with_rest(rows, rows[..., :whole].reshape(-1, ROTATED) @ inverse, 1 / _ENLARGED)


def _with_rest(rows: Tensor, blocks: Tensor, factor: float) -> Tensor:
    turned = blocks.view(*rows.shape[:-1], -1)
    rest = rows[..., turned.shape[-1] :] * factor
    return torch.cat((turned, rest), dim=-1) if rest.shape[-1] else turned
