"""A checkpoint's tensors as the decoder's parameters want them, where a family stores them in another way."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

import torch

from engine.models.families.names import Rows
from engine.weights.source import EncodedRows, WeightSource


class ArrangedSource:
    """`rows`: how each tensor is stored; names that end in one of `ignored` are left out."""

    def __init__(self, source: WeightSource, rows: Mapping[str, Rows], ignored: tuple[str, ...] = ()) -> None:
        self._source = source
        self._rows = rows
        self._ignored = ignored

    def _stored(self, name: str) -> str:
        return self._rows[name].stored if name in self._rows else "as it is"

    def shapes(self) -> Mapping[str, tuple[int, ...]]:
        return {
            name: shape[::-1] if self._stored(name) == "transposed" else shape
            for name, shape in self._source.shapes().items()
            if not name.endswith(self._ignored)
        }

    def file_of(self, name: str) -> str:
        return self._source.file_of(name)

    def read_into(self, name: str, destination: torch.Tensor) -> None:
        stored = self._stored(name)
        if stored == "transposed":
            turned = torch.empty(destination.shape[::-1], dtype=destination.dtype)
            self._source.read_into(name, turned)
            destination.copy_(turned.T)
            return
        self._source.read_into(name, destination)
        if stored == "less one":
            destination.add_(1.0)
        elif stored != "as it is":
            destination.copy_(destination[_order(self._rows[name])])

    def encoded(self, name: str) -> EncodedRows | None:
        stored = self._stored(name)
        found = None if stored in ("transposed", "less one") else self._source.encoded(name)
        if found is None or stored == "as it is":
            return found
        return replace(found, rows=found.rows[_order(self._rows[name])])

    def __enter__(self) -> ArrangedSource:
        return self

    def __exit__(self, *error: object) -> None:
        self._source.__exit__(*error)


def _order(row: Rows) -> torch.Tensor:
    """int64 [count]: which of the checkpoint's rows each of ours is."""
    rows = torch.arange(row.count)
    if row.stored == "heads of qkv":
        return rows.view(row.heads, 3, -1).transpose(0, 1).flatten()
    heads = rows.view(row.heads, -1)
    turned = heads[:, : row.paired].unflatten(1, (-1, 2)).transpose(1, 2).flatten(1)  # type: ignore[no-untyped-call]
    return torch.cat((turned, heads[:, row.paired :]), dim=1).flatten()
