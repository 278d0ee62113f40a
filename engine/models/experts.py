"""A mixture of experts with dense weights: the router, and the experts by the operator `pageloom::expert_linear`.

On GPUs both are an operator each (`engine.models.expert_op`). On CPUs a packer puts `PackedExperts` in their place, and
gives the router an operator.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

import torch
from torch import nn

from engine.models.expert_op import expert_linear, mixture, route
from engine.models.layers import NORMS, Linear, activated, parameter
from engine.models.packed import FUSED_GATES
from engine.models.product_kernels import DENSE, Gate, Matrix
from engine.models.spec import Activation, ClampedSwiGLU, ExpertsSpec, NormKind, RouterSpec

if TYPE_CHECKING:
    from engine.models.packed import PackedLinear

_LEAST_SUM = 1e-20
_CLAMPED_SWIGLU = 3
_KINDS = ("softmax", "chosen_softmax", "sigmoid")
"""by their numbers in `csrc/experts_schedule.h` and for `pageloom::route`"""
Route = Callable[..., tuple[torch.Tensor, torch.Tensor]]
"""(logits, kind, top_k, normalise, correction, groups, top_groups, scale): as `engine.models.expert_op.route`"""


class Router(nn.Module):
    """Which experts a token is given to, and the factors of what they return.

    `logits`: the layer that makes them. `correction`, `scales`: float32 [experts].
    """

    logits: Linear | PackedLinear
    correction: torch.Tensor | None
    scales: torch.Tensor | None

    def __init__(self, spec: RouterSpec, hidden: int, count: int, dtype: torch.dtype, device: torch.device) -> None:
        super().__init__()
        self.spec = spec
        self.logits = Linear(hidden, count, spec.bias, torch.float32 if spec.wide else dtype, device)
        self.logits.keeps_bits = True
        self.correction = parameter((count,), torch.float32, device) if spec.correction else None
        self.scales = parameter((count,), torch.float32, device) if spec.expert_scales else None
        self._route: Route | None = None
        if device.type == "cuda":
            self.use(route)

    def use(self, route: Route) -> None:
        """An operator for all that follows the logits. Operators have groups of sigmoids alone."""
        if self.spec.groups == 1 or self.spec.kind == "sigmoid":
            self._route = route

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """x [tokens, hidden] → ids int32, the best first, and factors float32, both [tokens, top_k]."""
        logits = self.logits(x.float() if self.spec.wide and isinstance(self.logits, Linear) else x)
        ids, factors = self.choose(logits if logits.dtype == torch.float32 else logits.float())
        return ids, factors if self.scales is None else factors * self.scales[ids]

    def choose(self, logits: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """float32 [tokens, experts] → what `forward` returns, but for `scales`."""
        spec = self.spec
        if self._route is None:
            return chosen(logits, spec, self.correction)
        rules = (spec.groups, spec.top_groups, spec.scale)
        return self._route(logits, _KINDS.index(spec.kind), spec.top_k, spec.normalise, self.correction, *rules)


def chosen(
    logits: torch.Tensor, spec: RouterSpec, correction: torch.Tensor | None
) -> tuple[torch.Tensor, torch.Tensor]:
    """The rules of `RouterSpec` in torch: float32 [tokens, experts] → ids int32 and factors float32 [tokens, top_k].
    Experts of groups that are not looked at are never chosen."""
    scores = logits
    if spec.kind != "chosen_softmax":
        scores = torch.sigmoid(logits) if spec.kind == "sigmoid" else torch.softmax(logits, -1)
    ranks = scores if correction is None else scores + correction
    if spec.groups > 1:
        groups = ranks.view(-1, spec.groups, ranks.size(-1) // spec.groups)
        best = torch.topk(groups.topk(1 if spec.by_best else 2).values.sum(-1), spec.top_groups).indices
        is_seen = torch.zeros_like(groups[..., 0], dtype=torch.bool).scatter(1, best, True)
        ranks = groups.masked_fill(~is_seen[..., None], -torch.inf).flatten(1)
    ids = torch.topk(ranks, spec.top_k).indices
    factors = scores.gather(1, ids)
    if spec.kind == "chosen_softmax":
        factors = torch.softmax(factors, -1)
    elif spec.normalise:
        factors = factors / (factors.sum(-1, keepdim=True) + _LEAST_SUM)
    return ids.to(torch.int32), factors * spec.scale


def gated(inner: torch.Tensor, activation: Activation | ClampedSwiGLU) -> torch.Tensor:
    """[rows, 2 * n], gates and then ups, → [rows, n]."""
    gate, up = inner.chunk(2, dim=-1)
    if isinstance(activation, str):
        return activated(gate, activation) * up
    gate, up = gate.clamp(max=activation.limit), up.clamp(-activation.limit, activation.limit)
    return gate * torch.sigmoid(activation.alpha * gate) * (up + 1)


def kernel_gate(activation: Activation | ClampedSwiGLU) -> Gate | None:
    """As the kernels number it; None: they do not have it."""
    if isinstance(activation, ClampedSwiGLU):
        return Gate(_CLAMPED_SWIGLU, activation.limit, activation.alpha)
    return Gate(FUSED_GATES[activation]) if activation in FUSED_GATES else None


class NormsApart(nn.Module):
    """Of a layer whose experts and dense MLP are normed each by itself before they are added up."""

    def __init__(self, kind: NormKind, size: int, eps: float, dtype: torch.dtype, device: torch.device) -> None:
        super().__init__()
        self.behind_dense = NORMS[kind](size, eps, dtype, device)
        self.of_router = NORMS[kind](size, eps, dtype, device)
        self.of_experts = NORMS[kind](size, eps, dtype, device)
        self.behind_experts = NORMS[kind](size, eps, dtype, device)


class Experts(nn.Module):
    """The MLPs of all experts of a layer, or of those that this rank has.

    `gate_up` [experts, 2 * inner, hidden] (of plain ones [experts, inner, hidden]), `down` [experts, hidden, inner],
    `gate_up_bias` [experts, 2 * inner] and `down_bias` [experts, hidden], in the model's dtype. `places` int32 [experts
    that the router knows]: which of these each is, or -1: another rank has it, and it adds nothing here. None: these
    are all.
    """

    gate_up_bias: torch.Tensor | None
    down_bias: torch.Tensor | None
    places: torch.Tensor | None
    fixed: bool
    """on CUDA: a token's bits do not depend on how many there are"""

    def __init__(self, spec: ExpertsSpec, hidden: int, dtype: torch.dtype, device: torch.device) -> None:
        super().__init__()
        count, inner = spec.held, spec.inner_size
        self.count, self.activation, self.gated = count, spec.activation, spec.gated
        self._gate = self.kernel_gate if device.type == "cuda" else None
        self.fixed = False
        self.gate_up = parameter((count, spec.first_size, hidden), dtype, device)
        self.down = parameter((count, hidden, inner), dtype, device)
        self.gate_up_bias = parameter((count, spec.first_size), dtype, device) if spec.bias else None
        self.down_bias = parameter((count, hidden), dtype, device) if spec.bias else None
        self.register_buffer("places", None if spec.own is None else _places(spec.own, spec.count, device))

    @property
    def kernel_gate(self) -> Gate | None:
        """None: the kernels do not have such experts."""
        return kernel_gate(self.activation) if self.gated else None

    def forward(
        self, x: torch.Tensor, ids: torch.Tensor, factors: torch.Tensor, residual: torch.Tensor | None = None
    ) -> torch.Tensor:
        """x [tokens, hidden], normed already; ids and factors [tokens, top_k], as `Router` returns them. `residual`
        [tokens, hidden] is added to the result."""
        ids = ids if self.places is None else self.places[ids]
        if self._gate is not None:
            gate_up, down = (Matrix(each, None, DENSE) for each in (self.gate_up, self.down))
            biases = (self.gate_up_bias, self.down_bias)
            return mixture(x, ids, factors, gate_up, down, biases, residual, self._gate, self.fixed)
        top_k, flat = ids.size(1), ids.flatten()
        inner = expert_linear(x.repeat_interleave(top_k, dim=0), flat, self.gate_up, self.gate_up_bias)
        out = expert_linear(self._activated(inner), flat, self.down, self.down_bias)
        return _weighted(out.unflatten(0, (-1, top_k)), factors, residual)  # type: ignore[no-untyped-call]  # torch leaves it untyped

    def _activated(self, inner: torch.Tensor) -> torch.Tensor:
        if self.gated or not isinstance(self.activation, str):
            return gated(inner, self.activation)
        return activated(inner, self.activation)

    @staticmethod
    def combined(
        rows: torch.Tensor, positions: torch.Tensor, factors: torch.Tensor, residual: torch.Tensor | None
    ) -> torch.Tensor:
        """The end of `forward` alone. rows [n, hidden]: what experts anywhere made of rows with factor 1; positions
        int32 [tokens, top_k]: which of them a token's choices are."""
        return _weighted(rows[positions], factors, residual)


def _weighted(rows: torch.Tensor, factors: torch.Tensor, residual: torch.Tensor | None) -> torch.Tensor:
    """[tokens, top_k, hidden] → [tokens, hidden]"""
    y = (rows.float() * factors[..., None]).sum(dim=1).to(rows.dtype)
    return y if residual is None else residual + y


def _places(own: Sequence[int], count: int, device: torch.device) -> torch.Tensor:
    places = torch.full((count,), -1, dtype=torch.int32)
    places[list(own)] = torch.arange(len(own), dtype=torch.int32)
    return places.to(device)
