"""The layers of a `HeadSpec`, in float32 whatever the model's dtype: a few rows of a step pass them."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import nn
from torch.nn import functional as F

from engine.models.heads import HeadSpec
from engine.models.layers import Linear, UnbiasedLayerNorm

_ACTIVATIONS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {"tanh": torch.tanh, "relu": F.relu, "gelu": F.gelu}


class Head(nn.Module):
    def __init__(self, spec: HeadSpec, hidden: int, eps: float, device: torch.device) -> None:
        super().__init__()
        form, wide = spec.form, torch.float32
        self.spec = spec
        self.dense = None if form.dense is None else Linear(hidden, hidden, form.dense_bias, wide, device)
        self.norm = None if form.norm is None else UnbiasedLayerNorm(hidden, eps, wide, device)
        self.out = Linear(hidden, len(spec.labels), form.out_bias, wide, device)

    def forward(self, states: torch.Tensor) -> torch.Tensor:
        """[rows, hidden_size] → float32 [rows, labels]."""
        x = states.float()
        if self.dense is not None:
            x = _ACTIVATIONS[self.spec.form.activation](self.dense(x))
        if self.norm is not None:
            x = self.norm(x)
        y: torch.Tensor = self.out(x)
        return y

    def take_tokens(self, embedding: torch.Tensor) -> None:
        """The rows of `HeadSpec.token_ids` in the unembedding [tokens, hidden_size] become its matrix."""
        rows = embedding.float()
        self.out.weight.copy_(rows if len(rows) == len(self.spec.labels) else rows[1:] - rows[:1])
