"""A mixture of experts over packed weights (`engine.cpu_kernels.experts`): routing, and the experts themselves."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import nn

from engine.models.packed import FUSED_GATES
from engine.models.spec import Activation

if TYPE_CHECKING:
    from engine.cpu_kernels.experts import ClampedSwiGLU, ExpertWeights, Routing
    from engine.cpu_kernels.linear import LinearOps


class Router(nn.Module):
    """From logits to choices. `normalise`: a token's factors are divided by their sum; then `scale` multiplies them.
    `bias`, float32 [experts], and groups (`top_groups` of `groups` count) go with `Routing.SIGMOID`."""

    bias: torch.Tensor | None

    def __init__(
        self,
        ops: LinearOps,
        kind: Routing,
        top_k: int,
        *,
        normalise: bool = True,
        bias: torch.Tensor | None = None,
        groups: int = 1,
        top_groups: int = 1,
        scale: float = 1.0,
    ) -> None:
        super().__init__()
        self.register_buffer("bias", bias)
        self.kind, self.top_k, self.normalise = int(kind), top_k, normalise
        self.groups, self.top_groups, self.scale = groups, top_groups, scale
        self.op = ops.route

    def forward(self, logits: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """float32 [tokens, experts] → ids int32, the best first, and weights float32, both [tokens, top_k]."""
        ids, weights = self.op(
            logits, self.kind, self.top_k, self.normalise, self.bias, self.groups, self.top_groups, self.scale
        )
        return ids, weights


class PackedExperts(nn.Module):
    """The gated MLPs of all experts of a layer; bfloat16 activations."""

    gate_up: torch.Tensor
    down: torch.Tensor
    gate_up_bias: torch.Tensor | None
    down_bias: torch.Tensor | None

    def __init__(self, ops: LinearOps, weights: ExpertWeights, gate: Activation | ClampedSwiGLU) -> None:
        super().__init__()
        self.register_buffer("gate_up", weights.gate_up)
        self.register_buffer("down", weights.down)
        self.register_buffer("gate_up_bias", weights.gate_up_bias)
        self.register_buffer("down_bias", weights.down_bias)
        self.inner = weights.inner
        self.gate_up_format, self.down_format = int(weights.gate_up_format), int(weights.down_format)
        if isinstance(gate, str):
            self.gate, self.limit, self.alpha = FUSED_GATES[gate], 0.0, 0.0
        else:
            self.gate, self.limit, self.alpha = gate.number, gate.limit, gate.alpha
        self.op = ops.packed_experts

    def forward(
        self, x: torch.Tensor, ids: torch.Tensor, weights: torch.Tensor, residual: torch.Tensor | None = None
    ) -> torch.Tensor:
        """x [tokens, hidden], normed already; ids int32 and weights float32 [tokens, top_k], as `Router` returns them.
        `residual` [tokens, hidden] is added to the result. Raises RuntimeError: an id is outside the experts."""
        y: torch.Tensor = self.op(
            x,
            ids,
            weights,
            self.gate_up,
            self.down,
            self.inner,
            self.gate_up_format,
            self.down_format,
            self.gate_up_bias,
            self.down_bias,
            residual,
            self.gate,
            self.limit,
            self.alpha,
            0,
        )
        return y
