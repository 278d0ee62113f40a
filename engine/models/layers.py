"""What a decoder is built of: linear layers, norms, embeddings, with dense weights.

A linear layer takes along what happens around it (the norm before, activation or residual after), because on CPUs a
packed layer (`engine.models.packed`) does all of it in one operator; a dense one does it step by step and leaves fusing
to the compiler. Rounding points are the same either way.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import nn
from torch.nn import functional as F

from engine.models.linear_op import linear as small_batch_linear
from engine.models.spec import Activation, NormKind

RowNorm = Callable[[torch.Tensor, "RMSNorm", "torch.Tensor | None"], torch.Tensor]
"""(x, norm, residual): what `RMSNorm.forward` returns"""


class Norm(nn.Module):
    """Over the last dimension, of `weight`'s size. A residual is added to what the norm returns."""

    weight: torch.Tensor
    eps: float

    def forward(self, x: torch.Tensor, residual: torch.Tensor | None = None) -> torch.Tensor:
        y = self.weighted(x, self.weight)
        return y if residual is None else residual + y

    def weighted(self, x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        """x normalised and weighted; `weight` is this norm's or one of its shape and dtype, expanded to fit x."""
        raise NotImplementedError


class RMSNorm(Norm):
    """Normalised in float32, rounded to the model's dtype, then weighted (transformers' order for Llama)."""

    rows: RowNorm | None
    """an operator that takes the place of `forward`, where the norm stands alone"""

    def __init__(self, size: int, eps: float, dtype: torch.dtype, device: torch.device) -> None:
        super().__init__()
        self.weight = parameter((size,), dtype, device)
        self.eps = eps
        self.rows = None

    def forward(self, x: torch.Tensor, residual: torch.Tensor | None = None) -> torch.Tensor:
        return super().forward(x, residual) if self.rows is None else self.rows(x, self, residual)

    def weighted(self, x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        return weight * normalised(x, self.eps).to(x.dtype)


class WideRMSNorm(RMSNorm):
    """Normalised and weighted in float32, then rounded (transformers' order for Gemma, OLMo 2 and Helium).

    `weight` is float32, because Gemma's is 1 + the checkpoint's, a sum that transformers makes in every forward.
    """

    def __init__(self, size: int, eps: float, dtype: torch.dtype, device: torch.device) -> None:
        super().__init__(size, eps, torch.float32, device)

    def weighted(self, x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        return (normalised(x, self.eps) * weight).to(x.dtype)


class LayerNorm(Norm):
    bias: torch.Tensor | None

    def __init__(self, size: int, eps: float, dtype: torch.dtype, device: torch.device) -> None:
        super().__init__()
        self.weight = parameter((size,), dtype, device)
        self.bias = parameter((size,), dtype, device)
        self.eps = eps

    def weighted(self, x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        return F.layer_norm(x, weight.shape, weight, self.bias, self.eps)


class UnbiasedLayerNorm(LayerNorm):
    def __init__(self, size: int, eps: float, dtype: torch.dtype, device: torch.device) -> None:
        super().__init__(size, eps, dtype, device)
        self.bias = None


NORMS: dict[NormKind, type[RMSNorm | LayerNorm]] = {
    "rms": RMSNorm,
    "rms_wide": WideRMSNorm,
    "layer": LayerNorm,
    "layer_no_bias": UnbiasedLayerNorm,
}


def activated(x: torch.Tensor, activation: Activation) -> torch.Tensor:
    match activation:
        case "silu":
            return F.silu(x)
        case "relu":
            return F.relu(x)
        case "relu2":
            return F.relu(x).square()
        case "gelu" | "gelu_tanh":
            return F.gelu(x, approximate="tanh" if activation == "gelu_tanh" else "none")


class XIELU(nn.Module):
    """Huang and Schlag, Deriving Activation Functions Using Integration (2024): by learnt weights x squared above 0 and
    exp(x) - 1 - x below, plus half of x."""

    def __init__(self, dtype: torch.dtype, device: torch.device) -> None:
        super().__init__()
        self.alpha_p = parameter((1,), dtype, device)
        self.alpha_n = parameter((1,), dtype, device)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        above = F.softplus(self.alpha_p) * x * x
        below = (torch.expm1(x.clamp(max=-1e-6)) - x) * (0.5 + F.softplus(self.alpha_n))
        return torch.where(x > 0, above, below) + 0.5 * x


class ScaledGate(nn.Module):
    """A gated activation of [gates | ups], with factors: of gates before it, and of what it makes (Falcon-H1)."""

    def __init__(self, activation: Activation, gate_scale: float, scale: float) -> None:
        super().__init__()
        self.activation: Activation = activation
        self.gate_scale, self.scale = gate_scale, scale

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        gate, up = x.chunk(2, dim=-1)
        return activated(gate * self.gate_scale, self.activation) * up * self.scale


def finished(
    y: torch.Tensor, activation: Activation | None, gated: bool, residual: torch.Tensor | None
) -> torch.Tensor:
    """A product as its layer returns it: see `Linear`."""
    if activation is not None and gated:
        gate, up = y.chunk(2, dim=-1)
        y = activated(gate, activation) * up
    elif activation is not None:
        y = activated(y, activation)
    return y if residual is None else residual + y


class Linear(nn.Module):
    """y = x Wᵀ + b. Weights are left uninitialised, since a checkpoint fills them.

    `activation`: of the outputs. `gated`: the outputs are gate and up, and the layer returns activation(gate) * up,
    half as many.
    """

    keeps_bits: bool
    """no quantisation of ours takes bits of its weights: there are few, and what they decide is all or nothing"""
    choice: int
    """who computes few rows, as `engine.models.linear_choice` finds; 0: the library, always; or `FIXED`"""

    def __init__(
        self,
        inputs: int,
        outputs: int,
        bias: bool,
        dtype: torch.dtype,
        device: torch.device,
        activation: Activation | None = None,
        gated: bool = False,
    ) -> None:
        super().__init__()
        self.weight = parameter((outputs, inputs), dtype, device)
        self.bias = parameter((outputs,), dtype, device) if bias else None
        self.activation = activation
        self.gated = gated
        self.choice = 0
        self.keeps_bits = False

    def forward(self, x: torch.Tensor, norm: Norm | None = None, residual: torch.Tensor | None = None) -> torch.Tensor:
        """x [tokens, inputs]: `norm` is applied to it first; `residual` [tokens, outputs] is added to the result."""
        if norm is not None:
            x = norm(x)
        y = small_batch_linear(x, self.weight, self.bias, self.choice) if self.choice else self._library(x)
        return finished(y, self.activation, self.gated, residual)

    def _library(self, x: torch.Tensor) -> torch.Tensor:
        return F.linear(x, self.weight, self.bias)


class Embedding(nn.Module):
    def __init__(self, vocab_size: int, hidden_size: int, dtype: torch.dtype, device: torch.device) -> None:
        super().__init__()
        self.weight = parameter((vocab_size, hidden_size), dtype, device)

    def forward(self, input_ids: torch.Tensor) -> torch.Tensor:
        return F.embedding(input_ids, self.weight)


def normalised(x: torch.Tensor, eps: float) -> torch.Tensor:
    """float32: x over the root mean square of its last dimension."""
    wide = x.float()
    return wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + eps)


def parameter(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> nn.Parameter:
    return nn.Parameter(torch.empty(shape, dtype=dtype, device=device), requires_grad=False)
