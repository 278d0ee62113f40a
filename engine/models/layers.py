"""What a decoder is built of: linear layers, norms, embeddings, with dense weights.

A linear layer takes along what happens around it (the norm before, gate or residual after), because on CPUs a packed
layer (`engine.models.packed`) does all of it in one operator; a dense one does it step by step and leaves fusing to the
compiler. Rounding points are the same either way.
"""

from __future__ import annotations

import torch
from torch import nn
from torch.nn import functional as F

from engine.models.linear_op import linear as small_batch_linear


class RMSNorm(nn.Module):
    """Normalised in float32, rounded to the model's dtype, then weighted (transformers' order)."""

    def __init__(self, size: int, eps: float, dtype: torch.dtype, device: torch.device) -> None:
        super().__init__()
        self.weight = parameter((size,), dtype, device)
        self.eps = eps

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.weight * normalised(x, self.eps)


class Linear(nn.Module):
    """y = x Wᵀ + b. Weights are left uninitialised, since a checkpoint fills them.

    `gated`: the outputs are gate and up of a SwiGLU, and the layer returns silu(gate) * up, half as many.
    """

    choice: int
    """who computes few rows, as `engine.models.linear_choice` finds; 0: the library, always"""

    def __init__(
        self,
        inputs: int,
        outputs: int,
        bias: bool,
        dtype: torch.dtype,
        device: torch.device,
        gated: bool = False,
    ) -> None:
        super().__init__()
        self.weight = parameter((outputs, inputs), dtype, device)
        self.bias = parameter((outputs,), dtype, device) if bias else None
        self.gated = gated
        self.choice = 0

    def forward(
        self, x: torch.Tensor, norm: RMSNorm | None = None, residual: torch.Tensor | None = None
    ) -> torch.Tensor:
        """x [tokens, inputs]: `norm` is applied to it first; `residual` [tokens, outputs] is added to the result."""
        if norm is not None:
            x = norm(x)
        y = small_batch_linear(x, self.weight, self.bias, self.choice) if self.choice else self._library(x)
        if self.gated:
            gate, up = y.chunk(2, dim=-1)
            y = F.silu(gate) * up
        return y if residual is None else residual + y

    def _library(self, x: torch.Tensor) -> torch.Tensor:
        return F.linear(x, self.weight, self.bias)


class Embedding(nn.Module):
    def __init__(self, vocab_size: int, hidden_size: int, dtype: torch.dtype, device: torch.device) -> None:
        super().__init__()
        self.weight = parameter((vocab_size, hidden_size), dtype, device)

    def forward(self, input_ids: torch.Tensor) -> torch.Tensor:
        return F.embedding(input_ids, self.weight)


def normalised(x: torch.Tensor, eps: float) -> torch.Tensor:
    """x over the root mean square of its last dimension, in float32, rounded to the dtype of x."""
    wide = x.float()
    return (wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + eps)).to(x.dtype)


def parameter(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> nn.Parameter:
    return nn.Parameter(torch.empty(shape, dtype=dtype, device=device), requires_grad=False)
