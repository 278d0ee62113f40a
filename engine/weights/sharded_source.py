"""A checkpoint's tensors as a rank wants them: the rows and columns that are its own."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

import torch

from engine.cpu_kernels.block_packing import LAYOUTS
from engine.models.sharding import Span
from engine.models.taken import Taken
from engine.weights.source import EncodedRows, WeightSource


class ShardedSource:
    """`parts`: what is taken of tensors of which that is not all, with the axis of their rows."""

    def __init__(self, source: WeightSource, parts: Mapping[str, tuple[Taken, int]]) -> None:
        self._source = source
        self._parts = parts

    def shapes(self) -> Mapping[str, tuple[int, ...]]:
        whole = self._source.shapes()
        return {name: self._shape(name, shape) for name, shape in whole.items() if not self._is_elsewhere(name)}

    def _is_elsewhere(self, name: str) -> bool:
        return name in self._parts and self._parts[name][0].experts == ()

    def _shape(self, name: str, whole: tuple[int, ...]) -> tuple[int, ...]:
        taken, axis = self._parts.get(name, (Taken(), 0))
        shape = list(whole)
        if taken.rows is not None:
            shape[axis] = sum(span.count for span in taken.rows)
        if taken.columns is not None:
            shape[-1] = taken.columns.count
        if taken.experts is not None:
            shape[0] = len(taken.experts)
        return tuple(shape)

    def file_of(self, name: str) -> str:
        return self._source.file_of(name)

    def read_into(self, name: str, destination: torch.Tensor, expert: int | None = None) -> None:
        taken, axis = self._parts.get(name, (Taken(), 0))
        if taken.is_all:
            self._source.read_into(name, destination, expert)
        elif taken.is_zero:
            destination.zero_()
        elif taken.experts is not None:
            for own, place in enumerate(destination) if expert is None else [(expert, destination)]:
                self._source.read_into(name, place, taken.experts[own])
        else:
            whole = self._source.mapped(name, expert)
            if whole is None:
                shape = self._source.shapes()[name]
                whole = torch.empty(shape if expert is None else shape[1:], dtype=destination.dtype)
                self._source.read_into(name, whole, expert)
            destination.copy_(_cut(whole, taken, axis if expert is None else 0))

    def mapped(self, name: str, expert: int | None = None) -> torch.Tensor | None:
        taken, axis = self._parts.get(name, (Taken(), 0))
        if taken.experts is not None:
            return None if expert is None else self._source.mapped(name, taken.experts[expert])
        found = None if taken.is_zero else self._source.mapped(name, expert)
        if found is None:
            return None
        return _cut(found, taken, axis if expert is None else 0)

    def encoded(self, name: str, expert: int | None = None) -> EncodedRows | None:
        taken, _ = self._parts.get(name, (Taken(), 0))
        if taken.experts is not None:
            return None if expert is None else self._source.encoded(name, taken.experts[expert])
        found = self._source.encoded(name, expert)
        if found is None or taken.is_all:
            return found
        if taken.rows is not None:
            found = replace(found, rows=_cut(found.rows, Taken(taken.rows), 0))
        if taken.columns is not None:
            return _columns_of(found, taken.columns, self._source.shapes()[name][-1])
        return found

    def __enter__(self) -> ShardedSource:
        return self

    def __exit__(self, *error: object) -> None:
        self._source.__exit__(*error)


def _cut(whole: torch.Tensor, taken: Taken, axis: int) -> torch.Tensor:
    if taken.rows is not None:
        parts = [whole.narrow(axis, span.first, span.count) for span in taken.rows]
        whole = parts[0] if len(parts) == 1 else torch.cat(parts, dim=axis)
    return whole if taken.columns is None else whole.narrow(-1, taken.columns.first, taken.columns.count)


def _columns_of(found: EncodedRows, columns: Span, k: int) -> EncodedRows | None:
    """Of rows of k inputs; None where the columns are no whole blocks: then they are decoded."""
    layout = LAYOUTS.get(found.format)
    if found.order is not None or layout is None or columns.first % layout.inputs or columns.count % layout.inputs:
        return None
    end = k // layout.inputs * layout.block_bytes
    first, last = (at // layout.inputs * layout.block_bytes for at in (columns.first, columns.end))
    return replace(found, rows=torch.cat((found.rows[:, first:last], found.rows[:, end:]), dim=1))
