"""Gated delta nets (Yang et al., *Gated Delta Networks*, 2024), as Qwen3-Next and Qwen3.5 have them, and Kimi's delta
attention (*Kimi Linear*, 2025), which keeps each number of a key in a part of its own."""

from __future__ import annotations

import torch
from torch import nn
from torch.nn import functional

from engine.cpu_kernels.linear import LinearOps
from engine.cpu_kernels.states import AUTO, MixShape, NativeMix, fits
from engine.models.device_packed import StoredLinear
from engine.models.layers import Linear, normalised, parameter
from engine.models.mixers import DeltaSpec
from engine.models.packed import JoinedLinear, PackedLinear
from engine.models.recurrence import as_bytes, read_states, recur
from engine.models.state_layers import LayerStates, convolved

_LENGTH_EPS = 1e-6


class LowRankGates(nn.Module):
    """Between the first matrix and Kimi's delta attention: gates of the output, and decays."""

    gate_b_proj: Linear | PackedLinear | StoredLinear | JoinedLinear
    decay_b_proj: Linear | PackedLinear | StoredLinear | JoinedLinear

    def __init__(self, spec: DeltaSpec, rank: int, dtype: torch.dtype, device: torch.device) -> None:
        super().__init__()
        self._sizes = [spec.channels, rank, spec.value_heads, rank]
        self.gate_b_proj = Linear(rank, spec.value_size, False, dtype, device)
        self.decay_b_proj = Linear(rank, spec.decay_size, False, dtype, device)

    def forward(self, given: torch.Tensor) -> torch.Tensor:
        """[tokens, outputs of the first matrix] to what `DeltaNet` is given."""
        mixed, gate, amount, decay = torch.split(given, self._sizes, dim=1)
        made = self.gate_b_proj(gate.contiguous()), self.decay_b_proj(decay.contiguous())
        return torch.cat((mixed, made[0], amount, made[1]), dim=1)


class DeltaNet(nn.Module):
    def __init__(self, spec: DeltaSpec, norm_eps: float, dtype: torch.dtype, device: torch.device) -> None:
        super().__init__()
        self.facts, self.inputs, self.outputs, self._norm_eps = spec, spec.given_size, spec.value_size, norm_eps
        self._decays = spec.decay_size // spec.value_heads
        self.weight = parameter((spec.channels, 1, spec.taps), dtype, device)
        """of the convolution of queries, keys and values; the newest input's comes last"""
        self.log_decay = parameter((spec.value_heads,), torch.float32, device)
        self.decay_bias = parameter((spec.decay_size,), torch.float32, device)
        self.norm = parameter((spec.value_dim,), dtype, device)
        self._native: NativeMix | None = None

    @property
    def is_native(self) -> bool:
        return self._native is not None

    def compute_by(self, ops: LinearOps, isa: int = AUTO) -> None:
        """From now on natively, where there is a kernel; weights change no more."""
        spec = self.facts
        if fits(spec.taps, spec.key_dim, [self.weight.dtype]):
            heads = (spec.value_heads, spec.key_heads, spec.key_dim, spec.value_dim)
            shape = MixShape(0 if spec.rank is None else 3, *heads, spec.taps, self._norm_eps)
            rates = (self.log_decay, self.decay_bias)
            self._native = NativeMix(ops, shape, self.weight, None, *rates, None, self.norm, isa)

    def forward(self, x: torch.Tensor, out: torch.Tensor, states: LayerStates) -> None:
        """x [tokens, queries, keys and values | gates of the output | of values | decays]; out [tokens, value_heads *
        value_dim]."""
        if self._native is not None and states.place is not None:
            self._native(x, out, states.place, states.step.sequences, states.step.writes)
            return
        spec = self.facts
        sizes = [spec.channels, spec.value_size, spec.value_heads, spec.decay_size]
        mixed, gate, amount, decay = torch.split(x, sizes, dim=1)
        past, state = read_states(states, spec, x.dtype)
        sums, kept = convolved(mixed, past, states.step, self.weight, None)
        q, k, v = self._heads(functional.silu(sums.to(x.dtype)).float())
        rates = functional.softplus(decay.float() + self.decay_bias).view(-1, spec.value_heads, self._decays)
        log_decay = -self.log_decay.exp()[:, None] * rates
        made, written = recur(states.step, q, k, v, log_decay, amount.float().sigmoid(), state)
        out.copy_(self._gated(made.to(x.dtype), gate.view(v.shape)).flatten(1))
        states.write(as_bytes(spec, kept, written))

    def _heads(self, qkv: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """float32 [tokens, heads, dimensions] each: queries and keys of length one, queries scaled."""
        spec = self.facts
        q, k, v = torch.split(qkv, [spec.key_size, spec.key_size, spec.value_size], dim=1)
        q, k = (each.view(-1, spec.key_heads, spec.key_dim) for each in (q, k))
        q, k = (each * (each.square().sum(-1, keepdim=True) + _LENGTH_EPS).rsqrt() for each in (q, k))
        return q * spec.key_dim**-0.5, k, v.view(-1, spec.value_heads, spec.value_dim)

    def _gated(self, made: torch.Tensor, gate: torch.Tensor) -> torch.Tensor:
        normed = normalised(made, self._norm_eps)
        if self.facts.rank is not None:
            return (self.norm.float() * normed * gate.float().sigmoid()).to(made.dtype)
        normed = normed.to(made.dtype)
        return ((self.norm * normed).float() * functional.silu(gate.float())).to(made.dtype)
