"""Who holds a row of the device tables, and which rows are free."""

from __future__ import annotations

from bisect import bisect_left, insort

from engine.kv_cache.kv_cache import KVCache
from engine.scheduling.beam_group import BeamGroup
from engine.scheduling.failures import Failures
from engine.scheduling.sequence import Sequence, Status
from engine.scheduling.steady_rows import SteadyRows
from engine.scheduling.steady_searches import SteadySearches


class RunningSet:
    def __init__(self, num_rows: int, kv: KVCache, fewest_searches: int, failures: Failures) -> None:
        self.sequences: list[Sequence] = []
        """sorted by key, so the last one is the first to be preempted; changed by `enter` and `leave` alone"""
        self.steady = SteadyRows(num_rows, kv, failures)
        self.searches = SteadySearches(num_rows, kv, fewest_searches)
        self._groups: set[BeamGroup] = set()
        """searches that run"""
        self._free = list(range(num_rows - 1, -1, -1))
        self._released: list[int] = []

    @property
    def num_free(self) -> int:
        """Rows that are free and not reserved."""
        return len(self._free)

    def reserve(self, group: BeamGroup) -> None:
        """A row for each member but one, which `enter` will take."""
        self._groups.add(group)
        group.spare_rows = [self._free.pop() for _ in group.members[1:]]

    def give_back(self, group: BeamGroup) -> None:
        self._groups.discard(group)
        self._free += group.spare_rows
        group.spare_rows = []

    def enter(self, seq: Sequence) -> None:
        """The sequence runs, on a row of its group's or any free one."""
        reserved = seq.group.spare_rows if seq.group is not None else []
        seq.row = reserved.pop() if reserved else self._free.pop()
        seq.status, seq.new_row = Status.RUNNING, True
        insort(self.sequences, seq, key=_key)

    def leave(self, seq: Sequence) -> None:
        """Its row is free, or its group's again."""
        self.recall(seq)
        self.steady.vacate(seq.row)
        del self.sequences[bisect_left(self.sequences, seq.key, key=_key)]
        (self._free if seq.group is None else seq.group.spare_rows).append(seq.row)
        if not seq.new_row:
            self._released.append(seq.row)
        seq.row, seq.new_row = -1, False

    def settle(self, group: BeamGroup, idle: list[Sequence]) -> None:
        """After a choice: members that are `idle` leave, those that carry a beam for the first time enter."""
        for member in idle:
            if member.status is Status.RUNNING:
                self.leave(member)
                member.status = Status.FOLLOWING
        for beam in group.beams:
            if beam.status is not Status.RUNNING:
                self.enter(beam)

    def went_on(self, group: BeamGroup) -> None:
        """After a choice, its beams may be steady."""
        self.searches.enter(group, len(self._groups))

    @property
    def num_quiet(self) -> int:
        """Tokens that a step may plan in columns."""
        return len(self.steady) + self.searches.num_ready

    def recall(self, seq: Sequence) -> None:
        """What is in columns of a sequence, or of all beams of its search, is in its fields again."""
        if seq.steady:
            self.steady.leave(seq)
        elif seq.group is not None and seq.group.table is not None:
            seq.group.table.leave(seq.group)

    def take_released(self) -> list[int]:
        """Rows that were left since the last call."""
        released, self._released = self._released, []
        return released


def _key(seq: Sequence) -> tuple[int, int]:
    return seq.key
