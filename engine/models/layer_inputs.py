"""Inputs that each layer has of its own for each token (Gemma 4's per-layer embeddings)."""

from __future__ import annotations

import torch
from torch import nn

from engine.models.device_packed import StoredLinear
from engine.models.layers import NORMS, Embedding, Linear
from engine.models.packed import ActivatedLinear, JoinedLinear, PackedLinear
from engine.models.spec import DecoderSpec, LayerInputsSpec

_AnyLinear = Linear | PackedLinear | StoredLinear | JoinedLinear | ActivatedLinear


class LayerInputs(nn.Module):
    """All layers' inputs: what a token is by a table of its own, and what its embedding says, in equal parts."""

    project: _AnyLinear

    def __init__(self, spec: DecoderSpec, inputs: LayerInputsSpec, dtype: torch.dtype, device: torch.device) -> None:
        super().__init__()
        self.shape = (spec.num_layers, inputs.size)
        self.embed = Embedding(inputs.vocab_size, spec.num_layers * inputs.size, dtype, device)
        self.project = Linear(spec.hidden_size, spec.num_layers * inputs.size, False, dtype, device)
        self.norm = NORMS[spec.norm](inputs.size, spec.norm_eps, dtype, device)
        self.embed_scale = torch.tensor(inputs.size**0.5, dtype=dtype).item()
        self.project_scale = spec.hidden_size**-0.5

    def forward(self, input_ids: torch.Tensor, hidden: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """int64 [tokens], embeddings [tokens, hidden_size] → [tokens, size] for each layer, contiguous: an input of a
        piece must look the same for every layer."""
        projected = (self.project(hidden) * self.project_scale).unflatten(-1, self.shape)
        told = self.embed(input_ids).unflatten(-1, self.shape) * self.embed_scale
        both = (self.norm.weighted(projected, self.norm.weight) + told) * 2**-0.5
        own: tuple[torch.Tensor, ...] = both.transpose(0, 1).contiguous().unbind(0)
        return own


class LayerInput(nn.Module):
    """What one layer does with its own."""

    gate: _AnyLinear
    out: _AnyLinear

    def __init__(self, spec: DecoderSpec, inputs: LayerInputsSpec, dtype: torch.dtype, device: torch.device) -> None:
        super().__init__()
        self.gate = Linear(spec.hidden_size, inputs.size, False, dtype, device, inputs.activation)
        self.out = Linear(inputs.size, spec.hidden_size, False, dtype, device)
        self.norm = NORMS[spec.norm](spec.hidden_size, spec.norm_eps, dtype, device)

    def forward(self, hidden: torch.Tensor, own: torch.Tensor) -> torch.Tensor:
        """[tokens, hidden_size], [tokens, size] → [tokens, hidden_size]."""
        out: torch.Tensor = self.norm(self.out(self.gate(hidden) * own), hidden)
        return out
