"""Mamba 2 (Dao and Gu, *Transformers are SSMs*, 2024)."""

from __future__ import annotations

import torch
from torch import nn
from torch.nn import functional

from engine.cpu_kernels.linear import LinearOps
from engine.cpu_kernels.states import AUTO, MixShape, NativeMix, fits
from engine.models.layers import parameter
from engine.models.mixers import MambaSpec
from engine.models.recurrence import as_bytes, read_states, recur
from engine.models.state_layers import LayerStates, convolved


class Mamba(nn.Module):
    scales: torch.Tensor | None
    """float32 [inputs]"""

    def __init__(self, spec: MambaSpec, dtype: torch.dtype, device: torch.device) -> None:
        super().__init__()
        self.facts, self.inputs, self.outputs = spec, spec.given_size, spec.inner_size
        self.weight = parameter((spec.channels, 1, spec.taps), dtype, device)
        """of the convolution of values, keys and queries; the newest input's comes last"""
        self.bias = parameter((spec.channels,), dtype, device) if spec.conv_bias else None
        self.log_decay = parameter((spec.heads,), torch.float32, device)
        self.decay_bias = parameter((spec.heads,), torch.float32, device)
        self.passed_on = parameter((spec.heads,), torch.float32, device)
        """how much of a value is added to what is read"""
        self.norm = parameter((spec.inner_size,), dtype, device) if spec.normed else None
        scales = None
        if spec.scales is not None:
            shared = spec.groups * spec.state_size
            sizes = torch.tensor([spec.inner_size, spec.inner_size, shared, shared, spec.heads])
            scales = torch.tensor(spec.scales).repeat_interleave(sizes).to(device)
        self.register_buffer("scales", scales, persistent=False)
        self.out_scale = spec.out_scale
        """behind the norm, wherever that is"""
        self._native: NativeMix | None = None

    @property
    def is_native(self) -> bool:
        return self._native is not None

    def compute_by(self, ops: LinearOps, isa: int = AUTO) -> None:
        """From now on natively, where there is a kernel; weights change no more."""
        spec = self.facts
        if fits(spec.taps, spec.state_size, [self.weight.dtype]):
            heads = (spec.heads, spec.groups, spec.state_size, spec.head_dim)
            shape = MixShape(1, *heads, spec.taps, spec.norm_eps, *spec.amounts)
            rates = (self.log_decay, self.decay_bias, self.passed_on)
            self._native = NativeMix(ops, shape, self.weight, self.bias, *rates, self.norm, isa)

    def forward(self, x: torch.Tensor, out: torch.Tensor, states: LayerStates) -> None:
        """x [tokens, gates of the output | values, keys and queries | decays]; out [tokens, heads * head_dim]."""
        self._mix(x if self.scales is None else (x * self.scales).to(x.dtype), out, states)
        if self.out_scale != 1.0:
            out.mul_(self.out_scale)

    def _mix(self, x: torch.Tensor, out: torch.Tensor, states: LayerStates) -> None:
        if self._native is not None and states.place is not None:
            self._native(x, out, states.place, states.step.sequences, states.step.writes)
            return
        spec = self.facts
        gate, mixed, decay = torch.split(x, [spec.inner_size, spec.channels, spec.heads], dim=1)
        past, state = read_states(states, spec, x.dtype)
        sums, kept = convolved(mixed, past, states.step, self.weight, self.bias)
        shared = spec.groups * spec.state_size
        v, k, q = torch.split(functional.silu(sums.to(x.dtype)).float(), [spec.inner_size, shared, shared], dim=1)
        k, q = (each.view(-1, spec.groups, spec.state_size) for each in (k, q))
        v = v.view(-1, spec.heads, spec.head_dim)
        amount = functional.softplus(decay.float() + self.decay_bias).clamp(*spec.amounts)
        log_decay = -self.log_decay.exp() * amount
        made, written = recur(states.step, q, k, v * amount[..., None], log_decay[..., None], None, state)
        gated = (made + v * self.passed_on[:, None]).flatten(1) * functional.silu(gate.float())
        out.copy_(gated if self.norm is None else self._normed(gated, self.norm))
        states.write(as_bytes(spec, kept, written))

    def _normed(self, gated: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        groups = gated.view(len(gated), self.facts.groups, -1)
        scale = (groups.square().mean(-1, keepdim=True) + self.facts.norm_eps).rsqrt()
        return weight * (groups * scale).flatten(1)
