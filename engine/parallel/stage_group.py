"""The ranks of a pipeline: a group for what they agree on, and for each stage its neighbours."""

from __future__ import annotations

from contextlib import AbstractContextManager

from engine.models.stages import Stage
from engine.parallel.group import AllGather, AllReduce, Group
from engine.parallel.stage_link import LinkEnd


def stage_of_rank(rank: int, size: int) -> Stage:
    """Rank 0, in whose process results are wanted, computes the last stage; the others follow from the first one on."""
    return Stage((rank - 1) % size, size)


class StageGroup:
    """A `Group` of a rank that computes a stage."""

    def __init__(self, group: Group, before: LinkEnd | None, after: LinkEnd | None) -> None:
        self._group = group
        self.stage = stage_of_rank(group.rank, group.size)
        self.before, self.after = before, after

    @property
    def name(self) -> str:
        return self._group.name

    @property
    def rank(self) -> int:
        return self._group.rank

    @property
    def size(self) -> int:
        return self._group.size

    @property
    def all_reduce(self) -> AllReduce:
        return self._group.all_reduce

    @property
    def all_gather(self) -> AllGather:
        return self._group.all_gather

    def alone(self) -> AbstractContextManager[None]:
        return self._group.alone()

    def abort(self, reason: str) -> None:
        self._group.abort(reason)
