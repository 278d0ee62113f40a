"""A mixture of experts on CPUs: how the weights of all experts are packed, and the kinds of routing.

Each expert is a gated MLP of two packed matrices, laid out as for any layer (`csrc/linear.h`); those of all experts lie
one after another, so that one tensor holds them.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from enum import IntEnum

import torch
from torch import Tensor

from engine.cpu_kernels.formats import Format
from engine.cpu_kernels.linear import interleave_gate_up, pack_bf16
from engine.cpu_kernels.quantize import PACK_DENSE

_PACK = {Format.BFLOAT16: pack_bf16, **PACK_DENSE}


class Routing(IntEnum):
    """How logits become choices and factors; numbers as in `csrc/experts_schedule.h`."""

    SOFTMAX = 0
    """softmax over all experts, the best of them, and normalised or not (Qwen3-MoE, Mixtral); with a bias chosen by
    softmax + bias (ERNIE 4.5)"""
    CHOSEN_SOFTMAX = 1
    """the best logits, and softmax over those (GPT-OSS)"""
    SIGMOID = 2
    """sigmoids; chosen by sigmoid + bias in the best groups, which are compared by the sum of their two best
    (DeepSeek-V3, as in its own code: experts of other groups are never chosen; transformers gives them the score 0)"""


@dataclass(frozen=True)
class ExpertWeights:
    """Of all experts of a layer."""

    gate_up: Tensor
    """uint8 [experts, panels, panel_bytes] of [2 * inner, hidden] each, rows interleaved by `interleave_gate_up`"""
    down: Tensor
    """uint8 [experts, panels, panel_bytes] of [hidden, inner] each"""
    gate_up_format: Format
    down_format: Format
    hidden: int
    inner: int
    gate_up_bias: Tensor | None = None
    """bfloat16 [experts, 2 * inner], interleaved as the rows"""
    down_bias: Tensor | None = None
    """bfloat16 [experts, hidden]"""

    @property
    def experts(self) -> int:
        return self.gate_up.size(0)


def stack_experts(count: int, pack: Callable[[int], Tensor]) -> Tensor:
    """uint8 [count, panels, panel_bytes]: what `pack` makes of each expert, one at a time. count >= 1."""
    first = pack(0)
    stacked = first.new_empty((count, *first.shape))
    stacked[0] = first
    for expert in range(1, count):
        stacked[expert] = pack(expert)
    return stacked


def pack_experts(
    gate_up: Tensor,
    down: Tensor,
    format: Format,
    *,
    gate_up_bias: Tensor | None = None,
    down_bias: Tensor | None = None,
) -> ExpertWeights:
    """Dense weights as bfloat16, INT8, Q4_1 or FLOAT8.

    gate_up: [experts, 2 * inner, hidden], gate rows then up rows; down: [experts, hidden, inner]; gate_up_bias:
    [experts, 2 * inner], in the same order; down_bias: [experts, hidden]. Any float dtype. Raises ValueError: shapes
    that do not go together, another format, or a matrix that does not fit it.
    """
    pack = _PACK.get(format)
    if pack is None:
        names = ", ".join(each.name for each in _PACK)
        raise ValueError(f"dense weights are packed as {names}; {format.name} is made of blocks")
    if gate_up.dim() != 3 or down.shape != (gate_up.size(0), gate_up.size(2), gate_up.size(1) // 2):
        raise ValueError(
            f"gate and up of experts, {list(gate_up.shape)}, do not go with their down, {list(down.shape)}: those are "
            "[experts, 2 * inner, hidden] and [experts, hidden, inner]"
        )
    count, hidden, inner = down.shape
    return ExpertWeights(
        stack_experts(count, lambda expert: pack(interleave_gate_up(gate_up[expert]))),
        stack_experts(count, lambda expert: pack(down[expert])),
        format,
        format,
        hidden,
        inner,
        *expert_biases(count, hidden, inner, gate_up_bias, down_bias),
    )


def expert_biases(
    count: int, hidden: int, inner: int, gate_up: Tensor | None, down: Tensor | None
) -> tuple[Tensor | None, Tensor | None]:
    """As the operator takes them."""
    for bias, size in ((gate_up, 2 * inner), (down, hidden)):
        if bias is not None and bias.shape != (count, size):
            raise ValueError(f"a bias of {count} experts is [{count}, {size}], not {list(bias.shape)}")
    if gate_up is not None:
        gate_up = torch.stack([interleave_gate_up(row) for row in gate_up.bfloat16()])
    return gate_up, None if down is None else down.bfloat16().contiguous()
