"""Tapes written by hand, number by number, and a function in the place of a layer's attention."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from engine.cpu_kernels.experts import ExpertWeights
from engine.cpu_kernels.formats import Format
from engine.cpu_kernels.linear import LinearOps

INPUT, RESULT, SCRATCH = range(3)
ATTENTION, LINEAR, ROTATION, ROUTE, EXPERTS = range(5)
NONE = (-1, 0)
Ref = tuple[int, int]
"""a value, and its first column that is meant"""
STEP = torch.zeros(1, dtype=torch.uint8)
"""what tapes without attention are run with"""


@dataclass(frozen=True)
class Weights:
    """A packed layer, and what `packed_linear` takes beside it."""

    packed: Tensor
    n: int
    k: int
    format: Format
    bias: Tensor | None = None
    norm: Tensor | None = None
    eps: float = 0.0
    gated: bool = False
    wide: bool = False

    @property
    def outputs(self) -> int:
        return self.n // 2 if self.gated else self.n


@dataclass(frozen=True)
class Heads:
    q: int
    k: int
    dim: int
    norms: tuple[Tensor, Tensor] | None = None
    eps: float = 0.0
    rotary: int | None = None
    """elements of a head that are rotated; None: all"""

    @property
    def columns(self) -> int:
        return (self.q + 2 * self.k) * self.dim


@dataclass
class TapeBuilder:
    """Values and steps in the order in which they are called for; `together` layers are one step."""

    tensors: list[Tensor] = field(default_factory=list)
    values: list[int] = field(default_factory=list)
    steps: list[list[int]] = field(default_factory=list)
    """numbers of each, its count first"""
    reals: list[float] = field(default_factory=list)
    counts: dict[int, int] = field(default_factory=dict)
    scratch_end: int = 0

    def value(self, columns: int, place: int, index: int | None = None, size: int = 2) -> int:
        """`index` None: the next of its place. `size`: bytes of an element."""
        if index is None:
            index = self.scratch_end if place == SCRATCH else self.counts.get(place, 0)
        self.counts[place] = self.counts.get(place, 0) + 1
        if place == SCRATCH:
            self.scratch_end = max(self.scratch_end, -(-(index + size * columns) // 64) * 64)
        self.values += [columns, size, place, index]
        return len(self.values) // 4 - 1

    def _tensor(self, tensor: Tensor | None) -> int:
        if tensor is None:
            return -1
        self.tensors.append(tensor)
        return len(self.tensors) - 1

    def _call(self, kind: int, numbers: list[int], reals: list[float], alone: bool) -> None:
        if alone or not self.steps or self.steps[-1][1] == ATTENTION:
            self.steps.append([0])
        self.steps[-1][0] += 1
        self.steps[-1] += [kind, *numbers]
        self.reals += reals

    def matrix(self, w: Weights, x: Ref, out: Ref, residual: Ref = NONE, *, alone: bool = False) -> None:
        numbers = [*x, w.k, self._tensor(w.packed), w.n, int(w.format), self._tensor(w.bias), self._tensor(w.norm)]
        numbers += [*residual, w.outputs, int(w.gated), int(w.wide), 0, *out, w.outputs]
        self._call(LINEAR, numbers, [w.eps], alone)

    def rotation(self, h: Heads, x: Ref, rope: Ref, out: Ref, residual: Ref = NONE, *, alone: bool = False) -> None:
        norms = h.norms or (None, None)
        numbers = [*x, h.columns, *rope, _rotary(h, rope), *(self._tensor(norm) for norm in norms)]
        numbers += [h.q, h.k, h.dim, *residual, h.columns, *out, h.columns]
        self._call(ROTATION, numbers, [h.eps], alone)

    def route(self, experts: int, top_k: int, logits: Ref, ids: Ref, weights: Ref) -> None:
        """The best, and a softmax over those."""
        self._call(ROUTE, [*logits, experts, 1, top_k, 0, -1, 1, 1, *ids, top_k, *weights, top_k], [1.0], False)

    def experts(
        self,
        w: ExpertWeights,
        top_k: int,
        x: Ref,
        ids: Ref,
        weights: Ref,
        out: Ref,
        residual: Ref,
        places: Tensor | None = None,
    ) -> None:
        numbers = [*x, w.hidden, *ids, top_k, *weights, top_k, self._tensor(w.gate_up), self._tensor(w.down), w.inner]
        numbers += [int(w.gate_up_format), int(w.down_format), -1, -1, self._tensor(places)]
        numbers += [*residual, w.hidden, 1, 0, *out, w.hidden]
        self._call(EXPERTS, numbers, [0.0, 0.0], False)

    def attention(
        self,
        function: int,
        layer: Tensor,
        q_kv: tuple[int, int],
        refs: Sequence[Ref],
        step: int = 0,
        scratch: Ref = NONE,
    ) -> None:
        q, kv = q_kv
        numbers = [1, ATTENTION, function, self._tensor(layer), step]
        sizes = (q, kv, kv, q, self._columns(scratch))
        self.steps.append(
            [*numbers, *(number for ref, size in zip((*refs, scratch), sizes, strict=True) for number in (*ref, size))]
        )

    def _columns(self, ref: Ref) -> int:
        return 0 if ref == NONE else self.values[4 * ref[0]]

    @property
    def program(self) -> list[int]:
        steps = [number for step in self.steps for number in step]
        return [len(self.values) // 4, *self.values, len(self.steps), *steps]

    def make(self, ops: LinearOps, program: list[int] | None = None) -> Tensor:
        tape: Tensor = tape_ops(ops).make_tape(self.tensors, self.program if program is None else program, self.reals)
        return tape


def _rotary(h: Heads, rope: Ref) -> int:
    if rope == NONE:
        return 0
    return h.dim if h.rotary is None else h.rotary


def tape_ops(ops: LinearOps) -> Any:
    return getattr(torch.ops, ops.packed_linear.namespace)


def run_tape(
    ops: LinearOps, tape: Tensor, inputs: Sequence[Tensor], *steps: Tensor, times: Tensor | None = None
) -> list[Tensor]:
    results: list[Tensor] = tape_ops(ops).run_tape(tape, list(inputs), list(steps) or [STEP], times)
    return results


def linear(ops: LinearOps, w: Weights, x: Tensor, residual: Tensor | None = None) -> Tensor:
    """The layer alone."""
    norm, gate = (w.norm, w.eps), int(w.gated)
    y: Tensor = ops.packed_linear(x, w.packed, w.n, int(w.format), w.bias, *norm, residual, gate, w.wide, 0)
    return y


def rotated(ops: LinearOps, h: Heads, x: Tensor, rope: Tensor | None, residual: Tensor | None = None) -> Tensor:
    norms = h.norms or (None, None)
    y: Tensor = ops.rotate_heads(x, rope, *norms, h.eps, h.q, h.k, h.dim, residual)
    return y


def rows_at(address: int, stride: int, rows: int, columns: int) -> Tensor:
    """bf16 [rows, columns], that memory itself."""
    size = (rows - 1) * stride + columns
    flat = torch.frombuffer((ctypes.c_uint16 * size).from_address(address), dtype=torch.bfloat16)
    return flat.as_strided((rows, columns), (stride, 1))
