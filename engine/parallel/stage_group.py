"""The ranks of a pipeline: a group for what all agree on, one for those that share a stage, and each one's neighbours.

stages, each of two parts         stage 0        stage 1        stage 2 (the last)
ranks                             2, 3           4, 5           0, 1
links                             2 → 4 → 0 and 3 → 5 → 1: states are whole in each part
"""

from __future__ import annotations

from contextlib import AbstractContextManager
from typing import NamedTuple

from engine.models.stages import Stage
from engine.parallel.group import OwnGroup
from engine.parallel.stage_link import LinkEnd


class Place(NamedTuple):
    stage: Stage
    part: int
    """of the stage's matrices"""


def place_of_rank(rank: int, stages: int, parts: int) -> Place:
    """Rank 0, in whose process results are wanted, computes the last stage, with the other parts of it; the ranks
    behind them follow from the first stage on."""
    stage, part = divmod(rank, parts)
    return Place(Stage((stage - 1) % stages, stages), part)


def neighbours(rank: int, stages: int, parts: int) -> tuple[int | None, int | None]:
    """The ranks that compute the same part of the stages before and behind."""
    stage, part = place_of_rank(rank, stages, parts)

    def rank_at(index: int) -> int:
        return (index + 1) % stages * parts + part

    before = rank_at(stage.index - 1) if stage.index > 0 else None
    return before, rank_at(stage.index + 1) if stage.index + 1 < stages else None


class StageGroup:
    """An `OwnGroup` of a rank that computes a stage, or a part of one: all ranks, in what is theirs."""

    def __init__(
        self, group: OwnGroup, parts: OwnGroup | None, stage: Stage, before: LinkEnd | None, after: LinkEnd | None
    ) -> None:
        """`parts`: of those that compute this stage together; None: it is alone."""
        self._group = group
        self.name, self.rank, self.size = group.name, group.rank, group.size
        self.all_reduce, self.all_gather = group.all_reduce, group.all_gather
        self.parts = parts
        self.stage = stage
        self.before, self.after = before, after

    def alone(self) -> AbstractContextManager[None]:
        """A thread that is alone is so in every group of this transport."""
        return self._group.alone()

    def abort(self, reason: str) -> None:
        self._group.abort(reason)
        if self.parts is not None:
            self.parts.abort(reason)

    def close(self) -> None:
        self._group.close()
        if self.parts is not None:
            self.parts.close()
