"""`pageloom::expert_linear`: rows times the matrices of experts. One operator, because how many rows an expert gets is
known only when a step runs. On GPUs also `pageloom::experts`, all that a layer's experts do with a batch, and
`pageloom::route`, from logits to choices.

Weights are plain tensors, so that equal layers share compiled pieces.
"""

from __future__ import annotations

import torch
from torch.nn import functional as F

from engine.models.product_kernels import DENSE, Gate, Matrix, RoutingRules, device_kernels

EXPERT_LINEAR_OP = "pageloom::expert_linear"

_library = torch.library.Library("pageloom", "FRAGMENT")  # type: ignore[no-untyped-call]  # torch leaves it untyped
_library.define(  # type: ignore[no-untyped-call]  # torch leaves it untyped
    "expert_linear(Tensor x, Tensor ids, Tensor weight, Tensor? bias, bool transposed) -> Tensor",
    tags=(torch.Tag.pt2_compliant_tag, torch.Tag.needs_fixed_stride_order),
)
_library.define(  # type: ignore[no-untyped-call]  # torch leaves it untyped
    "experts(Tensor x, Tensor ids, Tensor factors, Tensor gate_up, Tensor? gate_up_scales, int gate_up_format, "
    "Tensor? gate_up_bias, Tensor down, Tensor? down_scales, int down_format, Tensor? down_bias, Tensor? residual, "
    "int gate, float limit, float alpha, bool fixed) -> Tensor",
    tags=(torch.Tag.pt2_compliant_tag, torch.Tag.needs_fixed_stride_order),
)
_library.define(  # type: ignore[no-untyped-call]  # torch leaves it untyped
    "route(Tensor logits, int kind, int top_k, bool normalise, Tensor? correction, int groups, int top_groups, "
    "float scale) -> (Tensor, Tensor)",
    tags=(torch.Tag.pt2_compliant_tag,),
)


def on_cpu(
    x: torch.Tensor, ids: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, transposed: bool
) -> torch.Tensor:
    """The operator on CPU tensors: an expert's rows together."""
    order = torch.argsort(ids, stable=True)
    first, *counts = torch.bincount(ids + 1, minlength=weight.size(0) + 1).tolist()
    out = x.new_empty(x.size(0), weight.size(2 if transposed else 1))
    out[order[:first]] = 0.0
    for expert, count in enumerate(counts):
        if count:
            rows = order[first : first + count]
            matrix = weight[expert].T if transposed else weight[expert]
            out[rows] = F.linear(x[rows], matrix, None if bias is None else bias[expert])
            first += count
    return out


def on_cuda(
    x: torch.Tensor, ids: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, transposed: bool
) -> torch.Tensor:
    """The operator on CUDA tensors."""
    return device_kernels().expert_linear(x, ids, Matrix(weight, None, DENSE, transposed), bias)


def experts_on_cuda(
    x: torch.Tensor,
    ids: torch.Tensor,
    factors: torch.Tensor,
    gate_up: torch.Tensor,
    gate_up_scales: torch.Tensor | None,
    gate_up_format: int,
    gate_up_bias: torch.Tensor | None,
    down: torch.Tensor,
    down_scales: torch.Tensor | None,
    down_format: int,
    down_bias: torch.Tensor | None,
    residual: torch.Tensor | None,
    gate: int,
    limit: float,
    alpha: float,
    fixed: bool,
) -> torch.Tensor:
    """See `mixture`."""
    matrices = Matrix(gate_up, gate_up_scales, gate_up_format), Matrix(down, down_scales, down_format)
    biases, kernels = (gate_up_bias, down_bias), device_kernels()
    return kernels.experts(x, ids, factors, matrices, biases, residual, Gate(gate, limit, alpha), fixed)


def route_on_cuda(
    logits: torch.Tensor,
    kind: int,
    top_k: int,
    normalise: bool,
    correction: torch.Tensor | None,
    groups: int,
    top_groups: int,
    scale: float,
) -> tuple[torch.Tensor, torch.Tensor]:
    """See `route`."""
    rules = RoutingRules(kind, top_k, normalise, groups, top_groups, scale)
    return device_kernels().route(logits, correction, rules)


def _shape(
    x: torch.Tensor, ids: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, transposed: bool
) -> torch.Tensor:
    return x.new_empty(x.size(0), weight.size(2 if transposed else 1))


def _choices(logits: torch.Tensor, kind: int, top_k: int, *others: object) -> tuple[torch.Tensor, torch.Tensor]:
    shape = (logits.shape[0], top_k)
    return logits.new_empty(shape, dtype=torch.int32), logits.new_empty(shape, dtype=torch.float32)


def _like_x(x: torch.Tensor, *others: object) -> torch.Tensor:
    return torch.empty_like(x, memory_format=torch.contiguous_format)


ON_DEVICE = {"expert_linear": on_cuda, "experts": experts_on_cuda, "route": route_on_cuda}
"""operators of this module, and what computes them on CUDA tensors"""
for _name, _function in ON_DEVICE.items():
    _library.impl(_name, _function, "CUDA")  # type: ignore[no-untyped-call]  # torch leaves it untyped
_library.impl("expert_linear", on_cpu, "CPU")  # type: ignore[no-untyped-call]  # torch leaves it untyped
for _op, _made in ((EXPERT_LINEAR_OP, _shape), ("pageloom::experts", _like_x), ("pageloom::route", _choices)):
    torch.library.register_fake(_op, _made, lib=_library)


def expert_linear(
    x: torch.Tensor, ids: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, transposed: bool = False
) -> torch.Tensor:
    """x [rows, k], ids [rows], weight [experts, n, k] (`transposed`: [experts, k, n]), bias [experts, n] → [rows, n]:
    each row times its expert's matrix; zeros where the id is -1."""
    product: torch.Tensor = torch.ops.pageloom.expert_linear(x, ids, weight, bias, transposed)
    return product


def mixture(
    x: torch.Tensor,
    ids: torch.Tensor,
    factors: torch.Tensor,
    gate_up: Matrix,
    down: Matrix,
    biases: tuple[torch.Tensor | None, torch.Tensor | None],
    residual: torch.Tensor | None,
    gate: Gate,
    fixed: bool = False,
) -> torch.Tensor:
    """On CUDA tensors: what `engine.models.experts.Experts` computes, with matrices of any format; biases [experts,
    2 * inner] and [experts, hidden]. ids lie within the experts, as a router returns them, or are -1: then they add
    nothing. Nobody looks again. `fixed`: a token's bits do not depend on how many there are."""
    y: torch.Tensor = torch.ops.pageloom.experts(
        x,
        ids,
        factors,
        gate_up.levels,
        gate_up.scales,
        gate_up.format,
        biases[0],
        down.levels,
        down.scales,
        down.format,
        biases[1],
        residual,
        gate.kind,
        gate.limit,
        gate.alpha,
        fixed,
    )
    return y


def route(
    logits: torch.Tensor,
    kind: int,
    top_k: int,
    normalise: bool,
    correction: torch.Tensor | None,
    groups: int,
    top_groups: int,
    scale: float,
) -> tuple[torch.Tensor, torch.Tensor]:
    """On CUDA tensors: float32 [tokens, experts] → ids int32 and factors float32 [tokens, top_k], as
    `engine.models.spec.RouterSpec` says. What is no number makes a token's factors NaN, and its ids are valid."""
    ids, factors = torch.ops.pageloom.route(logits, kind, top_k, normalise, correction, groups, top_groups, scale)
    return ids, factors
