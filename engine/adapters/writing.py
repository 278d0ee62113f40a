"""Factors into the slots of layers: an adapter has hundreds, so those of CPU kernels by one call."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import groupby

import torch
from torch._ops import OpOverload

from engine.adapters.linear import Room
from engine.adapters.peft import Factors

_Written = tuple[Room, Factors]


def write(slot: int, written: Sequence[_Written]) -> None:
    """Each into its room of that slot."""
    for op, group in groupby(sorted(written, key=_has_op), key=lambda each: each[0].op):
        if op is None:
            for room, factors in group:
                _write_one(slot, room, factors)
        else:
            _write_many(op, slot, list(group))


def _has_op(written: _Written) -> bool:
    return written[0].op is not None


def _write_one(slot: int, room: Room, factors: Factors) -> None:
    (count, rank), b = factors.b.shape, factors.b
    turned = b if factors.scale == 1.0 else b * factors.scale  # before it is turned: many at once
    room.b[slot, :rank, room.start : room.start + count].copy_(turned.T)
    room.a[slot, room.part, :rank].copy_(factors.a)
    room.ranks[slot, room.part] = rank


def _write_many(op: OpOverload, slot: int, written: list[_Written]) -> None:
    rooms, factors = [room for room, _ in written], [each for _, each in written]
    places = torch.tensor([(slot, room.part, room.start) for room in rooms])
    scales = torch.tensor([each.scale for each in factors], dtype=torch.float32)
    into = [room.a for room in rooms], [room.b for room in rooms], [room.ranks for room in rooms]
    op(*into, [each.a for each in factors], [each.b for each in factors], places, scales)
