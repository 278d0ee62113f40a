"""Ranks that compute something together, as models and runners see them, whatever carries their numbers.

Every rank calls the same collectives in the same order, with tensors of as many rows. Which bits come does not depend
on the transport: sums are made in float32, in the order of ranks, and rounded once.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager
from typing import Protocol

import torch


class AllReduce(Protocol):
    def __call__(self, x: torch.Tensor, residual: torch.Tensor | None, dtype: torch.dtype, group: str) -> torch.Tensor:
        """x [rows, columns] of every rank → their sum, made in float32 and rounded to `dtype`; to that, the residual
        [rows, columns] of that dtype is added, and the result rounded again. All ranks get the same bits.

        x is contiguous: float32, or of `dtype`. RuntimeError where a rank has gone, or calls something else.
        """
        ...


class AllGather(Protocol):
    def __call__(self, x: torch.Tensor, columns: Sequence[int], group: str) -> torch.Tensor:
        """x [rows, columns[rank]] of every rank → [rows, sum(columns)], side by side in the order of ranks.

        RuntimeError as above.
        """
        ...


class AllToAll(Protocol):
    def __call__(self, x: torch.Tensor, columns: Sequence[int], group: str) -> torch.Tensor:
        """x [rows, sum(columns)] of every rank, of which `columns[rank]` are for each rank, in order → what is for this
        one: [rows, ranks * columns[rank]], side by side in the order of ranks.

        RuntimeError as above.
        """
        ...


class Group(Protocol):
    """Its collectives are operators that torch.compile leaves as they are; they find their group by its name, so that
    ranks share compiled pieces."""

    @property
    def name(self) -> str: ...

    @property
    def rank(self) -> int: ...

    @property
    def size(self) -> int: ...

    @property
    def all_reduce(self) -> AllReduce: ...

    @property
    def all_gather(self) -> AllGather: ...

    def alone(self) -> AbstractContextManager[None]:
        """Within it the calling thread's collectives are with nobody and return zeros: for compilers, which try code
        whose results nobody reads, while other threads compute."""
        ...

    def abort(self, reason: str) -> None:
        """From any thread: whoever waits in a collective of this group, or will, gets a RuntimeError with `reason`;
        other ranks, too. The first reason stays."""
        ...


class ContextRanks(Group, Protocol):
    """That divide what each position's heads see."""

    @property
    def all_to_all(self) -> AllToAll: ...


class OwnGroup(Group, Protocol):
    """As whoever made it has it."""

    def close(self) -> None:
        """Frees what it holds; idempotent."""
        ...
