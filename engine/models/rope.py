"""Rotary embedding: the frequency rules of the families and the table that the decoder indexes by position.

Su et al., RoFormer (2021); linear: Chen et al., position interpolation (2023); YaRN: Peng et al. (2023), section 3; the
llama3 rule is Llama 3.1's; longrope: Ding et al. (2024), with long or short factors for a whole table. Arithmetic is
float32 in the order of transformers, so that tables agree to the bit.
"""

from __future__ import annotations

import math

import torch
from torch import nn

from engine.models.spec import RopeSpec


def inverse_frequencies(rope: RopeSpec, num_positions: int) -> tuple[torch.Tensor, float]:
    """float32 [rotary_dim / 2] radians per position, and the factor that cos and sin are multiplied with (YaRN,
    longrope). `num_positions`: that can be reached."""
    exponents = torch.arange(0, rope.rotary_dim, 2, dtype=torch.float32) / rope.rotary_dim
    wavelengths = rope.theta**exponents
    if rope.kind == "default":
        return 1.0 / wavelengths, 1.0
    factor = rope.params["factor"]
    if rope.kind == "proportional":
        frequencies = 1.0 / wavelengths
        frequencies[int(rope.params["share"] * rope.rotary_dim // 2) :] = 0.0
        return frequencies / factor, 1.0
    if rope.kind == "linear":
        return 1.0 / wavelengths / factor, 1.0
    if rope.original_max_position is None:
        raise ValueError(f"rope kind {rope.kind} needs original_max_position")
    if rope.kind == "longrope":
        factors = rope.long_factors if num_positions > rope.original_max_position else rope.short_factors
        stretched = torch.tensor(factors, dtype=torch.float32) * wavelengths
        return 1.0 / stretched, _longrope_attention_factor(rope, factor, rope.original_max_position)
    if rope.kind == "llama3":
        return _llama3(rope, 1.0 / wavelengths, factor, rope.original_max_position), 1.0
    kept = _yarn_kept_share(rope, rope.original_max_position)
    frequencies = 1.0 / (factor * wavelengths) * (1 - kept) + 1.0 / wavelengths * kept
    return frequencies, _yarn_attention_factor(rope, factor)


def rope_table(rope: RopeSpec, num_positions: int) -> torch.Tensor:
    """float32 [num_positions, rotary_dim]: cosines in the first half of a row, sines in the second; behind them what
    queries are multiplied with, where they grow.

    One tensor and halves only (the rotation uses each angle twice), so a token costs one gather.
    """
    frequencies, attention_factor = inverse_frequencies(rope, num_positions)
    positions = torch.arange(num_positions, dtype=torch.float32)[:, None]
    angles = positions * frequencies
    table = torch.cat((angles.cos(), angles.sin()), dim=-1) * attention_factor
    if rope.growth is None:
        return table
    periods = torch.floor((positions + rope.growth.ahead) / rope.growth.period)
    return torch.cat((table, 1 + rope.growth.rate * torch.log(1 + periods)), dim=-1)


class RopeTable(nn.Module):
    """`rope_table` of the positions that a model can reach, computed and no part of a checkpoint."""

    table: torch.Tensor

    def __init__(self, rope: RopeSpec, num_positions: int, device: torch.device) -> None:
        super().__init__()
        self._turns = rope.rotary_dim > 0
        self.register_buffer("table", rope_table(rope, num_positions).to(device), persistent=False)

    def forward(self, positions: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        """int64 [tokens] → [tokens, rotary_dim] (see `rope_table`); float32 where it only says how queries grow."""
        rows = self.table[positions]
        return rows.to(dtype) if self._turns else rows


def _llama3(rope: RopeSpec, frequencies: torch.Tensor, factor: float, original: int) -> torch.Tensor:
    """High frequencies stay, low ones are divided by `factor`, those between are blended."""
    low, high = rope.params["low_freq_factor"], rope.params["high_freq_factor"]
    wavelengths = 2 * math.pi / frequencies
    smooth = (original / wavelengths - low) / max(high - low, 1e-9)  # Llama 4: nothing lies between
    blended = (1 - smooth) * frequencies / factor + smooth * frequencies
    stretched = torch.where(wavelengths > original / low, frequencies / factor, blended)
    return torch.where(wavelengths < original / high, frequencies, stretched)


def _yarn_kept_share(rope: RopeSpec, original: int) -> torch.Tensor:
    """[rotary_dim / 2] in 0..1: how much of a frequency is kept; the rest is interpolated."""

    def dimension_that_turns(rotations: float) -> float:
        dim = rope.rotary_dim
        return dim * math.log(original / (rotations * 2 * math.pi)) / (2 * math.log(rope.theta))

    low = dimension_that_turns(rope.params.get("beta_fast") or 32)
    high = dimension_that_turns(rope.params.get("beta_slow") or 1)
    if rope.params.get("truncate", 1.0):
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, rope.rotary_dim - 1)
    if low == high:
        high += 0.001
    steps = torch.arange(rope.rotary_dim // 2, dtype=torch.float32)
    return 1 - torch.clamp((steps - low) / (high - low), 0, 1)


def _longrope_attention_factor(rope: RopeSpec, factor: float, original: int) -> float:
    given = rope.params.get("attention_factor")
    if given is not None:
        return given
    return math.sqrt(1 + math.log(factor) / math.log(original)) if factor > 1 else 1.0


def _yarn_attention_factor(rope: RopeSpec, factor: float) -> float:
    given = rope.params.get("attention_factor")
    if given is not None:
        return given

    def magnitude(scale: float) -> float:
        return 0.1 * scale * math.log(factor) + 1.0 if factor > 1 else 1.0

    mscale, mscale_all = rope.params.get("mscale", 0.0), rope.params.get("mscale_all_dim", 0.0)
    return magnitude(mscale) / magnitude(mscale_all) if mscale and mscale_all else magnitude(1.0)
