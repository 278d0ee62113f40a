"""Whole numbers with a scale and a zero point for a group of inputs: to floating point, and to the blocks that the
CPU's kernels multiply, without ever being inflated."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from engine.cpu_kernels.formats import Format
from engine.weights.source import EncodedRows

_BLOCK = 32
_ELEMENTS_AT_ONCE = 1 << 20
_LARGEST_ROUNDING = 2.0**-9
"""relative, of a scale that becomes float16: what bfloat16 would do to the weights"""


@dataclass(frozen=True)
class GroupIntegers:
    """w[o][i] = scales[o][g] * (levels[o][i] - zeros[o][g]), where g is the group of input i."""

    bits: int
    levels: Tensor
    """uint8 [n, k * bits / 8]; of four bits two inputs to a byte, the earlier one in its low half"""
    scales: Tensor
    """floating [n, groups]"""
    zeros: Tensor | None
    """int16 [n, groups]; None: in the middle, 2 ** (bits - 1)"""
    group: int
    """inputs of a group"""
    order: Tensor | None = None
    """int64 [k]: the group of each input, where they are not consecutive"""

    @property
    def inputs(self) -> int:
        return self.levels.shape[1] * 8 // self.bits

    def dequantize_into(self, destination: Tensor) -> None:
        """destination: [n, k] of any floating dtype. Computed in float32, where the products of numbers with scales of
        16 bits are exact, and rounded once."""
        n, k = destination.shape
        middle = 2.0 ** (self.bits - 1)
        run = max(1, _ELEMENTS_AT_ONCE // k)
        for start in range(0, n, run):
            rows = slice(start, start + run)
            values = self._values(self.levels[rows])
            scales = self._by_input(self.scales[rows].float(), k)
            values = values - middle if self.zeros is None else values - self._by_input(self.zeros[rows].float(), k)
            destination[rows].copy_(values.mul_(scales))

    def _values(self, levels: Tensor) -> Tensor:
        if self.bits == 8:
            return levels.float()
        return torch.stack((levels & 15, levels >> 4), dim=2).flatten(1).float()

    def _by_input(self, numbers: Tensor, k: int) -> Tensor:
        """[rows, groups] → [rows, k]"""
        if self.order is not None:
            return numbers[:, self.order]
        return numbers.repeat_interleave(self.group, dim=1)[:, :k]

    def encoded(self) -> EncodedRows | str:
        """As blocks of 32 inputs, or why they cannot be: then the weights are rounded to bfloat16.

        The same values bit for bit where scales are float16, or bfloat16 that float16 holds; others are rounded to it.
        """
        if self.order is not None:
            return self._sorted(self.order)
        if self.group % _BLOCK or self.inputs % _BLOCK:
            return f"groups of {self.group} inputs are no multiple of {_BLOCK}"
        halves = self.scales.half()
        error = (halves.float() - self.scales.float()).abs()
        if not bool((error <= self.scales.float().abs() * _LARGEST_ROUNDING).all()):
            return "their scales are beyond float16"
        return self._bytes(halves) if self.bits == 8 else self._nibbles(halves)

    def _sorted(self, order: Tensor) -> EncodedRows | str:
        """Columns by their groups, which are neighbours then (act-order), and which inputs they are for."""
        columns = torch.argsort(order, stable=True)
        if not torch.equal(order[columns], torch.arange(self.inputs) // self.group):
            return "their groups are of several sizes"
        if self.bits == 8:
            levels = self.levels[:, columns]
        else:
            levels = torch.stack((self.levels & 15, self.levels >> 4), dim=2).flatten(1)[:, columns]
            levels = levels[:, ::2] | (levels[:, 1::2] << 4)
        found = replace(self, levels=levels, order=None).encoded()
        return found if isinstance(found, str) else replace(found, order=columns.to(torch.int32))

    def _nibbles(self, halves: Tensor) -> EncodedRows:
        first, last = self.levels.view(len(self.levels), -1, 2, _BLOCK // 4).unbind(2)
        # A byte of a block pairs inputs 16 apart; what is stored pairs neighbours.
        nibbles = torch.stack(((first & 15) | (last << 4), (first >> 4) | (last & 240)), dim=3).flatten(2)
        numbers = [halves] if self.zeros is None else [halves, self.zeros.half()]
        format = Format.Q4_0 if self.zeros is None else Format.INT4_GROUP
        return EncodedRows(format, self._blocks(numbers, nibbles))

    def _bytes(self, halves: Tensor) -> EncodedRows | str:
        if self.zeros is None:
            levels = self.levels ^ 128
        else:
            wide = self.levels.to(torch.int16) - self._by_input(self.zeros, self.inputs)
            if bool((wide.to(torch.int8) != wide).any()):
                return "zero points leave numbers of nine bits"
            levels = wide.to(torch.int8).view(torch.uint8)
        return EncodedRows(Format.Q8_0, self._blocks([halves], levels.view(len(levels), -1, _BLOCK)))

    def _blocks(self, numbers: list[Tensor], levels: Tensor) -> Tensor:
        """numbers: float16 [n, groups] each; levels: uint8 [n, blocks, bytes] → uint8 [n, bytes of a row]"""
        repeats, blocks = self.group // _BLOCK, levels.shape[1]
        heads = [number.repeat_interleave(repeats, dim=1)[:, :blocks, None].view(torch.uint8) for number in numbers]
        return torch.cat((*heads, levels), dim=2).flatten(1)
