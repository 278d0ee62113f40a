"""The oracle of every transport: ranks are threads of one process, and sums are plain torch in the order of ranks."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager
from typing import TypeVar

import torch

T = TypeVar("T")
PATIENCE_S = 120.0


class Meeting:
    def __init__(self, size: int) -> None:
        self.barrier = threading.Barrier(size)
        self.parts: list[torch.Tensor | None] = [None] * size


class ThreadGroup:
    """One rank's end of it: see `engine.parallel.group.Group`."""

    name = "threads"

    def __init__(self, rank: int, meeting: Meeting) -> None:
        self.rank, self.size = rank, len(meeting.parts)
        self._meeting = meeting

    def _met(self, x: torch.Tensor) -> list[torch.Tensor]:
        self._meeting.parts[self.rank] = x
        self._meeting.barrier.wait(PATIENCE_S)
        parts = [part.clone() for part in self._meeting.parts if part is not None]  # which ranks may change then
        self._meeting.barrier.wait(PATIENCE_S)
        return parts

    def all_reduce(
        self, x: torch.Tensor, residual: torch.Tensor | None, dtype: torch.dtype, group: str
    ) -> torch.Tensor:
        first, *others = (part.float() for part in self._met(x))
        for part in others:
            first = first + part
        y = first.to(dtype)
        return y if residual is None else (residual.float() + y.float()).to(dtype)

    def all_gather(self, x: torch.Tensor, columns: Sequence[int], group: str) -> torch.Tensor:
        assert x.shape[1] == columns[self.rank]
        return torch.cat(self._met(x), dim=1)

    def all_to_all(self, x: torch.Tensor, columns: Sequence[int], group: str) -> torch.Tensor:
        return torch.cat([part.split(list(columns), dim=1)[self.rank] for part in self._met(x)], dim=1)

    def alone(self) -> AbstractContextManager[None]:
        raise NotImplementedError("nothing is compiled in these threads")

    def abort(self, reason: str) -> None:
        self._meeting.barrier.abort()


def in_ranks(size: int, work: Callable[[ThreadGroup], T]) -> list[T]:
    """What `work` returns in each rank's thread. Where one fails, the others do, and its error is raised."""
    meeting = Meeting(size)

    def run(rank: int) -> T:
        try:
            with torch.inference_mode():
                return work(ThreadGroup(rank, meeting))
        except BaseException:
            meeting.barrier.abort()
            raise

    with ThreadPoolExecutor(size) as pool:
        futures = [pool.submit(run, rank) for rank in range(size)]
        errors = [error for error in (future.exception() for future in futures) if error is not None]
        broken = [error for error in errors if not isinstance(error, threading.BrokenBarrierError)]
        for error in broken or errors:
            raise error
        return [future.result() for future in futures]
