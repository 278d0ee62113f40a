"""A checkpoint's tensors as the decoder's parameters want them, where a family stores them in another way."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import replace
from math import prod

import torch

from engine.models.families.rows import Rows
from engine.weights.source import EncodedRows, WeightSource

_AS_IT_IS = Rows("", 0, 0)
_IN_ORDER = ("as it is", "less one", "times root", "among ones")
_OTHER_NUMBERS = ("less one", "times root")


class ArrangedSource:
    """`rows`: how each tensor is stored; others that match `left_out` are not there."""

    def __init__(self, source: WeightSource, rows: Mapping[str, Rows], left_out: re.Pattern[str]) -> None:
        self._source = source
        self._rows = rows
        self._left_out = left_out

    def _place(self, name: str) -> Rows:
        return self._rows.get(name, _AS_IT_IS)

    def shapes(self) -> Mapping[str, tuple[int, ...]]:
        return {
            name: _arranged(shape, self._place(name))
            for name, shape in self._source.shapes().items()
            if name in self._rows or self._left_out.search(name) is None
        }

    def file_of(self, name: str) -> str:
        return self._source.file_of(name)

    def read_into(self, name: str, destination: torch.Tensor, expert: int | None = None) -> None:
        if not destination.is_contiguous():  # rows of what stacks several
            whole = torch.empty_like(destination, memory_format=torch.contiguous_format)
            self.read_into(name, whole, expert)
            destination.copy_(whole)
            return
        place = self._place(name)
        if place.stored == "among ones":
            self._source.read_into(name, destination.view(self._source.shapes()[name]))
        elif place.transposed:
            turned = torch.empty_like(destination.mT, memory_format=torch.contiguous_format)
            self._source.read_into(name, turned, expert)
            destination.copy_(turned.mT)
        else:
            self._source.read_into(name, destination, expert)
        if place.stored == "less one":
            destination.add_(1.0)
        elif place.stored == "times root":
            destination.mul_(place.count**-0.5)
        elif place.stored not in _IN_ORDER:
            axis = 0 if expert is not None else place.axis
            destination.copy_(destination.index_select(axis, _order(place).to(destination.device)))

    def mapped(self, name: str, expert: int | None = None) -> torch.Tensor | None:
        place = self._place(name)
        as_wanted = place.stored == "as it is" and not place.transposed
        return self._source.mapped(name, expert) if as_wanted else None

    def encoded(self, name: str, expert: int | None = None) -> EncodedRows | None:
        place = self._place(name)
        found = None if place.stored in _OTHER_NUMBERS else self._source.encoded(name, expert)
        if found is None or place.stored == "as it is":
            return found
        return replace(found, rows=found.rows[_order(place)])

    def __enter__(self) -> ArrangedSource:
        return self

    def __exit__(self, *error: object) -> None:
        self._source.__exit__(*error)


def _arranged(shape: tuple[int, ...], place: Rows) -> tuple[int, ...]:
    if place.transposed:
        return (*shape[:-2], shape[-1], shape[-2])
    return (place.count,) if place.stored == "among ones" and prod(shape) == place.count else shape


def rows_in_order(rows: torch.Tensor, place: Rows) -> torch.Tensor:
    """A checkpoint's rows in the decoder's order."""
    return rows if place.stored in _IN_ORDER else rows[_order(place)]


def _order(row: Rows) -> torch.Tensor:
    """int64 [count]: which of the checkpoint's rows each of ours is."""
    rows = torch.arange(row.count)
    if row.stored == "heads of qkv":
        return rows.view(row.heads, 3, -1).transpose(0, 1).flatten()
    if row.stored == "gates in heads":
        return rows.view(row.heads, 2, -1).transpose(0, 1).flip(0).flatten()
    if row.stored == "delta in heads":
        heads = rows.view(row.heads, -1)
        rest = (heads.size(1) - 2 * row.paired) // 2
        return torch.cat([each.flatten() for each in torch.split(heads, [row.paired, row.paired, rest, rest], dim=1)])
    if row.stored == "in turns":
        return rows.view(-1, 2).T.flatten()
    heads = rows.view(row.heads, -1)
    before, paired, behind = heads.tensor_split((row.passing, row.passing + row.paired), dim=1)
    turned = paired.unflatten(1, (-1, 2)).transpose(1, 2).flatten(1)  # type: ignore[no-untyped-call]
    return torch.cat((before, turned, behind), dim=1).flatten()
