"""Experts over packed weights (`engine.cpu_kernels.experts`)."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import nn

from engine.cpu_kernels.experts import ExpertWeights, Routing
from engine.cpu_kernels.formats import Format
from engine.models.experts import kernel_gate
from engine.models.packed import FUSED_GATES, PackedLinear
from engine.models.spec import Activation, ClampedSwiGLU

if TYPE_CHECKING:
    from engine.cpu_kernels.linear import LinearOps


class PackedExperts(nn.Module):
    """The gated MLPs of all experts of a layer; bfloat16 activations."""

    gate_up: torch.Tensor
    down: torch.Tensor
    gate_up_bias: torch.Tensor | None
    down_bias: torch.Tensor | None
    places: torch.Tensor | None

    def __init__(
        self,
        ops: LinearOps,
        weights: ExpertWeights,
        gate: Activation | ClampedSwiGLU,
        places: torch.Tensor | None = None,
    ) -> None:
        """`places`: see `engine.models.experts.Experts`."""
        super().__init__()
        self.register_buffer("gate_up", weights.gate_up)
        self.register_buffer("down", weights.down)
        self.register_buffer("gate_up_bias", weights.gate_up_bias)
        self.register_buffer("down_bias", weights.down_bias)
        self.register_buffer("places", places)
        self.inner = weights.inner
        self.gate_up_format, self.down_format = int(weights.gate_up_format), int(weights.down_format)
        found = kernel_gate(gate)
        assert found is not None  # whoever packs has looked
        self.gate, self.limit, self.alpha = found.kind, found.limit, found.alpha
        self.op, self._combine = ops.packed_experts, ops.combine_experts

    def combined(
        self, rows: torch.Tensor, positions: torch.Tensor, factors: torch.Tensor, residual: torch.Tensor | None
    ) -> torch.Tensor:
        """See `engine.models.experts.Experts`."""
        y: torch.Tensor = self._combine(rows, positions, factors, residual, 0)
        return y

    def forward(
        self, x: torch.Tensor, ids: torch.Tensor, factors: torch.Tensor, residual: torch.Tensor | None = None
    ) -> torch.Tensor:
        """x [tokens, hidden], normed already; ids int32 and factors float32 [tokens, top_k], as `Router` returns them.
        `residual` [tokens, hidden] is added to the result. Raises RuntimeError: an id is outside the experts."""
        y: torch.Tensor = self.op(
            x,
            ids,
            factors,
            self.gate_up,
            self.down,
            self.inner,
            self.gate_up_format,
            self.down_format,
            self.gate_up_bias,
            self.down_bias,
            self.places,
            residual,
            self.gate,
            self.limit,
            self.alpha,
            0,
        )
        return y


class GatedBeside(nn.Module):
    """A dense gated MLP beside a layer's experts that is multiplied with a sigmoid of its own: an expert that every
    token chooses, and its factor."""

    def __init__(self, ops: LinearOps, gate: PackedLinear, first: PackedLinear, second: PackedLinear) -> None:
        """`gate`: [tokens, hidden] → one logit. `first` is gated."""
        super().__init__()
        self.gate = gate
        self.gate.wide = True
        biases = [None if layer.bias is None else layer.bias[None] for layer in (first, second)]
        formats = Format(first.format), Format(second.format)
        weights = ExpertWeights(first.weight[None], second.weight[None], *formats, first.k, second.k, *biases)
        self.expert = PackedExperts(
            ops, weights, next(name for name, gate in FUSED_GATES.items() if gate == first.gate)
        )
        self.op = ops.route

    def forward(self, x: torch.Tensor, residual: torch.Tensor | None) -> torch.Tensor:
        """x, residual [tokens, hidden]; the residual is added."""
        ids, factors = self.op(self.gate(x), int(Routing.SIGMOID), 1, False, None, 1, 1, 1.0)
        y: torch.Tensor = self.expert(x, ids, factors, residual)
        return y
