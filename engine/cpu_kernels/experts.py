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

from engine.cpu_kernels import gguf_packing
from engine.cpu_kernels.formats import PANEL, Format, panel_bytes
from engine.cpu_kernels.linear import interleave_gate_up, pack_bf16
from engine.cpu_kernels.quantize import pack_gguf, pack_int4, pack_int8

CLAMPED_SWIGLU = 3
"""the gate of GPT-OSS, which dense layers do not have; the others: `engine.models.packed.FUSED_GATES`"""

_PACK: dict[Format, Callable[[Tensor], Tensor]] = {
    Format.BFLOAT16: pack_bf16,
    Format.INT8: pack_int8,
    Format.Q4_1: pack_int4,
}


class Routing(IntEnum):
    """How logits become choices and factors; numbers as in `csrc/experts_schedule.h`."""

    SOFTMAX = 0
    """softmax over all experts, the best of them, and normalised or not (Qwen3-MoE, Mixtral)"""
    CHOSEN_SOFTMAX = 1
    """the best logits, and softmax over those (GPT-OSS)"""
    SIGMOID = 2
    """sigmoids; chosen by sigmoid + bias among the best groups, which are compared by the sum of their two best (DeepSeek-V3:
    experts of other groups are never chosen, as in its own code; transformers gives them the score 0 instead)"""


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


def pack_stack(rows: Tensor, format: Format) -> Tensor:
    """rows: [experts, n, k], any float dtype → uint8 [experts, panels, panel_bytes], bfloat16, INT8 or Q4_1.

    Raises ValueError: another format, no three dimensions, or a matrix that does not fit (see the packing of one).
    """
    pack = _PACK.get(format)
    if pack is None:
        names = ", ".join(each.name for each in _PACK)
        raise ValueError(f"dense weights are packed as {names}, not {format.name}: that needs a GGUF file's blocks")
    return _pack_each(rows, panel_bytes(rows.shape[-1], format), pack)


def pack_block_stack(blocks: Tensor, format: Format) -> Tensor:
    """blocks: uint8 [experts, n, bytes of a row], as a GGUF file holds them → uint8 [experts, panels, panel_bytes].

    Raises ValueError: see `pack_gguf`.
    """
    layout = gguf_packing.LAYOUTS.get(format)
    size = 0 if layout is None else blocks.shape[-1] // layout.block_bytes * layout.panel_bytes
    return _pack_each(blocks, size, lambda rows: pack_gguf(rows, format))


def pack_experts(
    gate_up: Tensor,
    down: Tensor,
    format: Format,
    *,
    gate_up_bias: Tensor | None = None,
    down_bias: Tensor | None = None,
) -> ExpertWeights:
    """gate_up: [experts, 2 * inner, hidden], gate rows then up rows; down: [experts, hidden, inner]; biases, [experts, 2 *
    inner] and [experts, hidden], in the same order. Any float dtype. Raises ValueError where they do not fit."""
    _check_stacks(gate_up.shape[0], gate_up.shape[1], down)
    return ExpertWeights(
        _pack_each(
            gate_up, panel_bytes(gate_up.shape[2], format), lambda rows: pack_stack(rows[None], format)[0], True
        ),
        pack_stack(down, format),
        format,
        format,
        hidden=gate_up.shape[2],
        inner=gate_up.shape[1] // 2,
        gate_up_bias=_interleaved(gate_up_bias),
        down_bias=None if down_bias is None else down_bias.bfloat16().contiguous(),
    )


def pack_gguf_experts(
    gate: Tensor,
    up: Tensor,
    down: Tensor,
    gate_up_format: Format,
    down_format: Format,
    *,
    gate_up_bias: Tensor | None = None,
    down_bias: Tensor | None = None,
) -> ExpertWeights:
    """gate, up: uint8 [experts, inner, bytes of a row of `hidden` inputs]; down: uint8 [experts, hidden, bytes of a row of
    `inner`]; biases as in `pack_experts`. Raises ValueError where they do not fit."""
    if gate.shape != up.shape:
        raise ValueError(f"gate and up of the experts differ in shape: {list(gate.shape)}, {list(up.shape)}")
    _check_stacks(gate.shape[0], 2 * gate.shape[1], down)
    layout = gguf_packing.LAYOUTS[gate_up_format]
    size = gate.shape[2] // layout.block_bytes * layout.panel_bytes
    packed = torch.empty(gate.shape[0], 2 * gate.shape[1] // PANEL, size, dtype=torch.uint8)
    for expert in range(gate.shape[0]):
        rows = interleave_gate_up(torch.cat((gate[expert], up[expert])))
        packed[expert] = pack_gguf(rows, gate_up_format)
    return ExpertWeights(
        packed,
        pack_block_stack(down, down_format),
        gate_up_format,
        down_format,
        hidden=down.shape[1],
        inner=gate.shape[1],
        gate_up_bias=_interleaved(gate_up_bias),
        down_bias=None if down_bias is None else down_bias.bfloat16().contiguous(),
    )


def _pack_each(stack: Tensor, size: int, pack: Callable[[Tensor], Tensor], gated: bool = False) -> Tensor:
    """Expert by expert, so that nothing is held twice but one matrix."""
    if stack.dim() != 3:
        raise ValueError(f"experts' weights are [experts, n, k], not {list(stack.shape)}")
    packed = torch.empty(stack.shape[0], -(-stack.shape[1] // PANEL), size, dtype=torch.uint8)
    for expert, rows in enumerate(stack):
        packed[expert] = pack(interleave_gate_up(rows) if gated else rows)
    return packed


def _interleaved(bias: Tensor | None) -> Tensor | None:
    return None if bias is None else torch.stack([interleave_gate_up(row) for row in bias.bfloat16()])


def _check_stacks(experts: int, gate_up_rows: int, down: Tensor) -> None:
    if gate_up_rows % PANEL or down.shape[0] != experts:
        raise ValueError(
            f"gate and up of {experts} experts with {gate_up_rows} rows do not go with down of {down.shape[0]} experts, "
            f"or are not a multiple of {PANEL}"
        )
