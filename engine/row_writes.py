"""Many small writes to device tables, in columns: what a plan tells of rows that it does not name one by one."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Generic, TypeVar, overload

import numpy as np

from engine.step import BlockAppend, TokenRewrite

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class RowWrites:
    """Values for consecutive columns of rows. Nobody writes to the arrays any more."""

    rows: np.ndarray
    """int64 [writes]"""
    starts: np.ndarray
    """int64 [writes]: the first column of each"""
    lengths: np.ndarray
    """int64 [writes]: positive"""
    values: np.ndarray
    """integers [sum of `lengths`], one write after the other"""

    def __len__(self) -> int:
        return len(self.rows)

    def each(self) -> Iterator[tuple[int, int, list[int]]]:
        """Row, first column and values."""
        end = 0
        values = self.values.tolist()
        for row, start, length in zip(self.rows.tolist(), self.starts.tolist(), self.lengths.tolist(), strict=True):
            begin, end = end, end + length
            yield row, start, values[begin:end]


class _Writes(Sequence[T], Generic[T]):
    """Some one by one, then many in columns."""

    __slots__ = ("columns", "single")

    def __init__(self, single: list[T], columns: list[tuple[int, RowWrites]]) -> None:
        """`columns`: with their layer groups."""
        self.single, self.columns = single, columns

    def __len__(self) -> int:
        return len(self.single) + sum(len(writes) for _, writes in self.columns)

    def __iter__(self) -> Iterator[T]:
        yield from self.single
        for group, writes in self.columns:
            for row, start, values in writes.each():
                yield self._one(group, row, start, values)

    @overload
    def __getitem__(self, index: int) -> T: ...

    @overload
    def __getitem__(self, index: slice) -> list[T]: ...

    def __getitem__(self, index: int | slice) -> T | list[T]:
        return list(self)[index]

    def _one(self, group: int, row: int, start: int, values: list[int]) -> T:
        raise NotImplementedError


class BlockAppends(_Writes[BlockAppend]):
    __slots__ = ()

    def _one(self, group: int, row: int, start: int, values: list[int]) -> BlockAppend:
        return BlockAppend(row, group, start, values)


class TokenRewrites(_Writes[TokenRewrite]):
    """All of group 0."""

    __slots__ = ()

    def _one(self, group: int, row: int, start: int, values: list[int]) -> TokenRewrite:
        return TokenRewrite(row, start, values)
