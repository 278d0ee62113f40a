"""The weights of a convolution whose last inputs are a layer's state."""

from __future__ import annotations

import torch
from torch import nn

from engine.models.facts import ConvFacts
from engine.models.layers import parameter


class Convolution(nn.Module):
    """It computes nothing: who keeps states does, with these."""

    def __init__(self, spec: ConvFacts, bias: bool, dtype: torch.dtype, device: torch.device) -> None:
        super().__init__()
        self.channels = spec.channels
        self.weight = parameter((spec.channels, 1, spec.taps), dtype, device)
        """the newest input's comes last"""
        self.bias = parameter((spec.channels,), dtype, device) if bias else None
