"""Short convolutions between two gates, whose last inputs are a layer's state (LFM2)."""

from __future__ import annotations

import torch
from torch import nn

from engine.cpu_kernels.linear import LinearOps
from engine.cpu_kernels.states import AUTO, MixShape, NativeMix, fits
from engine.models.facts import ConvFacts
from engine.models.layers import parameter
from engine.models.state_layers import LayerStates, convolved


class Convolution(nn.Module):
    def __init__(self, spec: ConvFacts, bias: bool, dtype: torch.dtype, device: torch.device) -> None:
        super().__init__()
        self.facts, self.inputs, self.outputs = spec, spec.given_size, spec.channels
        self.weight = parameter((spec.channels, 1, spec.taps), dtype, device)
        """the newest input's comes last"""
        self.bias = parameter((spec.channels,), dtype, device) if bias else None

        self._native: NativeMix | None = None

    @property
    def is_native(self) -> bool:
        return self._native is not None

    def compute_by(self, ops: LinearOps, isa: int = AUTO) -> None:
        """From now on natively, where there is a kernel; weights change no more."""
        spec = self.facts
        if fits(spec.taps, 1, [self.weight.dtype]):
            shape = MixShape(2, 1, 1, 1, spec.channels, spec.taps, 0.0)
            self._native = NativeMix(ops, shape, self.weight, self.bias, isa=isa)

    def forward(self, x: torch.Tensor, out: torch.Tensor, states: LayerStates) -> None:
        """x [tokens, 3 * channels]: b, c and inputs; out [tokens, channels]."""
        if self._native is not None and states.place is not None:
            self._native(x, out, states.place, states.step.sequences, states.step.writes)
            return
        b, c, given = x.chunk(3, dim=1)
        state = states.read().view(x.dtype).view(-1, self.facts.taps - 1, self.facts.channels)
        sums, kept = convolved(b * given, state, states.step, self.weight, self.bias)
        torch.mul(c, sums.to(x.dtype), out=out)
        states.write(kept.flatten(1).view(torch.uint8))
