"""Small mixtures of experts with all that they stand for, the operator on them, and what it should return."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cache

import torch
import torch.nn.functional as F
from random_blocks import BLOCK_FORMATS, blocks_of
from torch import Tensor

from engine.cpu_kernels.experts import ExpertWeights, expert_biases, pack_experts, stack_experts
from engine.cpu_kernels.formats import Format
from engine.cpu_kernels.linear import LinearOps, interleave_gate_up, unpack
from engine.cpu_kernels.quantize import pack_blocks
from engine.cpu_kernels.rotation import rotate, rotate_back
from engine.models.spec import ClampedSwiGLU

FORMATS = (Format.BFLOAT16, Format.INT8, *BLOCK_FORMATS)
FLOAT8 = (Format.FLOAT8, Format.FLOAT8_BLOCK)
"""decoded to bfloat16, which multiplies unrounded rows"""
CLAMPED = ClampedSwiGLU()
_NO_CLAMP = ClampedSwiGLU(limit=0.0, alpha=0.0)


@dataclass(frozen=True)
class Case:
    weights: ExpertWeights
    gate_up: Tensor
    """float64 [experts, 2 * inner, hidden], what is packed: gate rows, then up rows"""
    down: Tensor
    """float64 [experts, hidden, inner]"""
    gate_up_bias: Tensor | None
    """float64 [experts, 2 * inner], gates first"""
    down_bias: Tensor | None

    @property
    def experts(self) -> int:
        return self.weights.experts

    def packed_part(self, own: Sequence[int]) -> tuple[ExpertWeights, Tensor]:
        """The matrices of those experts alone, and each expert's place among them."""
        w, chosen = self.weights, list(own)
        biases = [None if each is None else each[chosen] for each in (w.gate_up_bias, w.down_bias)]
        part = replace(w, gate_up=w.gate_up[chosen], down=w.down[chosen], gate_up_bias=biases[0], down_bias=biases[1])
        places = torch.full((self.experts,), -1, dtype=torch.int32)
        places[chosen] = torch.arange(len(chosen), dtype=torch.int32)
        return part, places


def normal(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


@cache
def make_case(format: Format, experts: int = 6, biased: bool = False) -> Case:
    """Of 6 experts: every format's own smallest odd shape."""
    hidden, inner = {Format.BFLOAT16: (102, 48), Format.INT8: (100, 80)}.get(format, (256, 256))
    biases = (normal(experts, 2 * inner, seed=3).bfloat16(), normal(experts, hidden, seed=4).bfloat16())
    given = {"gate_up_bias": biases[0], "down_bias": biases[1]} if biased else {}
    if format in (Format.BFLOAT16, Format.INT8):
        gate_up = normal(experts, 2 * inner, hidden, seed=1) * hidden**-0.5
        down = normal(experts, hidden, inner, seed=2) * inner**-0.5
        weights = pack_experts(gate_up, down, format, **given)
    else:

        def blocks(n: int, k: int, seed: int) -> Tensor:
            return torch.stack([blocks_of(format, n, k, 100 * seed + expert) for expert in range(experts)])

        gate_up = torch.cat((blocks(inner, hidden, 1), blocks(inner, hidden, 2)), dim=1)
        down = blocks(hidden, inner, 3)
        first = stack_experts(experts, lambda expert: pack_blocks(interleave_gate_up(gate_up[expert]), format))
        second = stack_experts(experts, lambda expert: pack_blocks(down[expert], format))
        packed_biases = expert_biases(experts, hidden, inner, *(biases if biased else (None, None)))
        weights = ExpertWeights(first, second, format, format, hidden, inner, *packed_biases)
    order = interleave_gate_up(torch.arange(2 * inner))
    mixed = torch.stack([_values(each, 2 * inner, hidden, format) for each in weights.gate_up])
    split = torch.empty_like(mixed)
    split[:, order] = mixed
    down_values = torch.stack([_values(each, hidden, inner, format) for each in weights.down])
    return Case(weights, split, down_values, *(bias.double() if biased else None for bias in biases))


def _values(packed: Tensor, n: int, k: int, format: Format) -> Tensor:
    values = unpack(packed, n, k, format)
    return (values.bfloat16() if format in FLOAT8 else values).double()


def choices(tokens: int, experts: int, top_k: int, seed: int = 0) -> tuple[Tensor, Tensor]:
    """Ids that differ within a token, and weights that add up to 1."""
    ids = normal(tokens, experts, seed=seed).topk(top_k, dim=1).indices.int()
    return ids, normal(tokens, top_k, seed=seed + 1).softmax(1)


def run(
    ops: LinearOps,
    case: Case,
    x: Tensor,
    ids: Tensor,
    weights: Tensor,
    isa: int = 0,
    *,
    residual: Tensor | None = None,
    gate: int = 1,
    clamp: ClampedSwiGLU = _NO_CLAMP,
    own: Sequence[int] | None = None,
) -> Tensor:
    """`own`: only those experts are here."""
    w, places = (case.weights, None) if own is None else case.packed_part(own)
    matrices = (w.gate_up, w.down, w.inner, int(w.gate_up_format), int(w.down_format), w.gate_up_bias, w.down_bias)
    out: Tensor = ops.packed_experts(x, ids, weights, *matrices, places, residual, gate, clamp.limit, clamp.alpha, isa)
    return out


def quantised(x: Tensor, format: Format) -> Tensor:
    """float64 [rows, k]: what a layer of this format multiplies for bfloat16 rows."""
    if format in (Format.BFLOAT16, *FLOAT8):
        return x.double()
    if format is Format.INT8:
        return rotate_back(_levels(rotate(x.float())[:, None]).view(x.shape))
    return _levels(x.float().view(x.shape[0], -1, 32)).view(x.shape)


def _levels(groups: Tensor) -> Tensor:
    largest = groups.abs().amax(2, keepdim=True)
    inverse = torch.where(largest > 0, torch.full_like(largest, 127) / largest, 0.0)
    return (groups * inverse).round().double() * (largest / 127).double()


def gated(gate: Tensor, up: Tensor, kind: int, clamp: ClampedSwiGLU) -> Tensor:
    """float64 from values that were rounded to bfloat16; rounded where separate operations would be."""
    if kind == 3:
        gate, up = gate.clamp(max=clamp.limit), up.clamp(-clamp.limit, clamp.limit)
        return (gate * torch.sigmoid(clamp.alpha * gate)).bfloat16().double() * (up + 1).bfloat16().double()
    activation = F.silu(gate) if kind == 1 else F.gelu(gate, approximate="tanh")
    return activation.bfloat16().double() * up


def reference(
    case: Case,
    x: Tensor,
    ids: Tensor,
    weights: Tensor,
    *,
    gate: int = 1,
    clamp: ClampedSwiGLU = _NO_CLAMP,
) -> Tensor:
    """float64 [tokens, hidden] without a residual, unrounded at the end: one expert after another."""
    total = torch.zeros(x.shape, dtype=torch.float64)
    for expert in range(case.experts):
        tokens, places = (ids == expert).nonzero(as_tuple=True)
        if len(tokens) == 0:
            continue
        product = quantised(x[tokens], case.weights.gate_up_format) @ case.gate_up[expert].T
        if case.gate_up_bias is not None:
            product = product + case.gate_up_bias[expert]
        halves = product.bfloat16().double().chunk(2, dim=1)
        hidden = gated(*halves, gate, clamp).bfloat16()
        out = quantised(hidden, case.weights.down_format) @ case.down[expert].T
        if case.down_bias is not None:
            out = out + case.down_bias[expert]
        total.index_add_(0, tokens, out.bfloat16().double() * weights[tokens, places, None].double())
    return total


def one_by_one(
    ops: LinearOps, case: Case, x: Tensor, ids: Tensor, weights: Tensor, isa: int, gate: int, residual: Tensor | None
) -> Tensor:
    """The same from dense layers of one row each, weighted and summed in float64: close to the float32 sum's bits."""
    w, rows = case.weights, []
    for token, chosen in enumerate(ids.tolist()):
        total = torch.zeros(w.hidden, dtype=torch.float64)
        for place, expert in enumerate(chosen):
            biases = [None if each is None else each[expert] for each in (w.gate_up_bias, w.down_bias)]
            hidden = ops.packed_linear(
                x[token : token + 1],
                w.gate_up[expert],
                2 * w.inner,
                int(w.gate_up_format),
                biases[0],
                None,
                0.0,
                None,
                gate,
                False,
                isa,
            )
            out = ops.packed_linear(
                hidden, w.down[expert], w.hidden, int(w.down_format), biases[1], None, 0.0, None, 0, False, isa
            )
            total += out[0].double() * weights[token, place].double()
        rows.append(total.float().bfloat16())
    y = torch.stack(rows)
    return y if residual is None else residual + y
