"""Sequences that decode, in columns by row: planning them and taking their tokens are a few array operations a step,
however many they are.

A sequence enters when a step was planned that samples, and nothing but one token in every step is to be expected of it;
it leaves before anything else happens to it: it ends, finds no room, or is preempted or aborted. Meanwhile its newest
tokens and how far it is computed are here; `leave` brings them back. Only where its last block is full, or a window
leaves a block behind, it is looked at for itself, and only every few blocks it is told its tokens, and those blocks are
made findable.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass

import numpy as np

from engine.kv_cache.kv_cache import NO_GROWTH, Growth, KVCache
from engine.row_writes import RowWrites
from engine.scheduling.failures import Failures
from engine.scheduling.sequence import Sequence
from engine.step import ScheduledRow

_MOST_IN_FLIGHT = 8
_MOST_NEW = 8
"""blocks of which an owner is not told at once"""
_NO_ROWS = np.zeros(0, dtype=np.int64)
FEWEST_STEADY = 10
"""Where fewer sequences run, planning them one by one costs less than the array operations."""


@dataclass(frozen=True, slots=True)
class SteadyStep:
    """One planned token each of sequences that were steady then. Nobody writes to the arrays any more."""

    owners: np.ndarray
    """object: sequences"""
    rows: np.ndarray
    """int64"""
    computed: np.ndarray
    """int32: before the step"""
    entries: np.ndarray
    """int64: which entry of its owner this was"""

    @property
    def positions(self) -> np.ndarray:
        return self.computed

    def __len__(self) -> int:
        return len(self.rows)


class SteadyRows:
    def __init__(self, num_rows: int, kv: KVCache, failures: Failures) -> None:
        self._kv, self._failures = kv, failures
        self._owners = np.full(num_rows, None, dtype=object)
        self._request_ids = np.full(num_rows, None, dtype=object)
        self._computed = np.zeros(num_rows, dtype=np.int32)
        self._until = np.zeros(num_rows, dtype=np.int32)
        """`computed` at which its owner is to be looked at"""
        self._entries = np.zeros(num_rows, dtype=np.int64)
        """when its owner entered, in order; 0: it is not steady"""
        self._stop_tokens: Counter[int] = Counter()
        """of all owners: how many have it"""
        self._limits = np.zeros(num_rows, dtype=np.int32)
        """`computed` at which its owner leaves, because it ends soon"""
        self._most_new = 0 if kv.slides else _MOST_NEW
        most = (self._most_new + 1) * kv.block_size + _MOST_IN_FLIGHT
        self._recent = np.zeros((num_rows, most), dtype=np.int32)
        """tokens that arrived since its owner entered or caught up"""
        self._num_recent = np.zeros(num_rows, dtype=np.int64)
        self._num_blocks = np.zeros(num_rows, dtype=np.int32)
        """full ones, and one that is to be filled"""
        self._blocks = np.zeros((kv.num_groups, num_rows, self._most_new), dtype=np.int64)
        """the last ones of these, of which its owner was not told, in each layer group"""
        self._num_new = np.zeros(num_rows, dtype=np.int64)
        self._longer = _NO_ROWS
        """rows that got a block of which the device was not told"""
        self._grown: dict[int, Growth] = {}
        """by row: what else the device was not told of its block table"""
        self._num_entries = 0
        self._rows: np.ndarray | None = None
        """those that are steady, until one enters or leaves"""
        self._count = 0

    def __len__(self) -> int:
        return self._count

    def enter(self, seq: Sequence) -> None:
        """The sequence has just been placed in a step that samples, and not its last token."""
        row = seq.row
        if self._owners[row] is not seq:
            self._owners[row], self._request_ids[row] = seq, seq.request_id
            self._stop_tokens.update(seq.stop_token_ids)
        self._num_entries += 1
        self._entries[row] = self._num_entries
        self._computed[row], self._num_recent[row] = seq.computed, 0
        self._num_blocks[row] = seq.blocks.num_blocks
        self._limits[row] = seq.max_total - 2
        self._until[row] = min(seq.blocks.quiet_until, seq.max_total - 2)
        seq.steady = seq.waits = True
        self._rows, self._count = None, self._count + 1

    def _catch_up(self, rows: np.ndarray) -> None:
        """Their owners' fields hold what has happened to them so far."""
        counts, added = self._num_recent[rows], self._num_new[rows]
        recent = self._recent[rows, : counts.max()].tolist()
        blocks = self._blocks[:, rows, : added.max()].tolist()
        self._num_recent[rows] = self._num_new[rows] = 0
        columns = (self._owners[rows], counts, self._computed[rows], added)
        for index, (seq, count, computed, new) in enumerate(zip(*(column.tolist() for column in columns), strict=True)):
            seq.tokens += recent[index][:count]
            seq.computed = seq.blocks.num_tokens = computed
            seq.in_flight = computed + 1 - len(seq.tokens)
            if new:
                self._kv.extend(seq.blocks, [group[index][:new] for group in blocks], computed)

    def leave(self, seq: Sequence) -> None:
        """Its fields hold what has happened to it, for good."""
        row = seq.row
        self._catch_up(np.array([row]))
        seq.steady = seq.waits = False
        self._entries[row] = 0
        seq.moved = self._grown.pop(row, NO_GROWTH)
        self._longer = self._longer[self._longer != row]  # it is preempted: all will be told of it anew
        self._rows, self._count = None, self._count - 1

    def vacate(self, row: int) -> None:
        """The row's owner, which is not steady, is about to leave it."""
        seq = self._owners[row]
        if seq is not None:
            for token in seq.stop_token_ids:
                self._stop_tokens[token] -= 1
                if not self._stop_tokens[token]:
                    del self._stop_tokens[token]
            self._owners[row] = self._request_ids[row] = None

    def look_out(self) -> None:
        """Those are looked at of whom the next step is more than a token in a block of their own: they get room for
        it, or leave because there is none, or because it is their last."""
        rows = self._steady
        rows = rows[self._computed[rows] >= self._until[rows]]
        ends = self._computed[rows] >= self._limits[rows]
        if ends.any():
            for seq in self._owners[rows[ends]].tolist():
                self.leave(seq)
            rows = rows[~ends]
        if not len(rows):
            return
        told = rows[self._num_new[rows] >= self._most_new]
        if len(told):
            self._catch_up(told)
            # Not what the next step fills: it may not come to that.
            self._kv.register_all([(seq.blocks, seq.tokens) for seq in self._owners[told].tolist()])
        full = self._computed[rows] == self._num_blocks[rows] * self._kv.block_size
        if self._kv.slides or not full.all() or not self._lengthen(rows):
            self._append(rows)

    def _lengthen(self, rows: np.ndarray) -> bool:
        """Another block for all of them, whose last ones are full, or for none."""
        num_groups, size = len(self._blocks), self._kv.block_size
        taken = self._kv.take(num_groups * len(rows))
        if taken is None:
            return False
        self._blocks[:, rows, self._num_new[rows]] = np.array(taken).reshape(num_groups, len(rows))
        self._num_new[rows] += 1
        self._num_blocks[rows] += 1
        self._until[rows] = np.minimum(self._num_blocks[rows] * size, self._limits[rows])
        self._longer = rows
        return True

    def _append(self, rows: np.ndarray) -> None:
        """Room for one more token each, or they leave."""
        self._catch_up(rows)
        for seq in self._owners[rows].tolist():
            growth = None
            with self._failures.isolate(seq):
                growth = self._kv.append(seq.blocks, seq.computed + 1)
            if growth is None:
                self.leave(seq)
                continue
            self._num_blocks[seq.row] = seq.blocks.num_blocks
            self._until[seq.row] = min(seq.blocks.quiet_until, seq.max_total - 2)
            if growth is not NO_GROWTH:
                self._grown[seq.row] = growth

    def place(self) -> tuple[SteadyStep, list[tuple[int, Growth]], list[tuple[int, RowWrites]]]:
        """All of them compute a token in the step that is planned. Returns also what the device is to be told: rows and
        the growth of their block tables, and blocks that were appended to others, by layer group."""
        grown = list(self._grown.items())
        self._grown.clear()
        appended = []
        longer, self._longer = self._longer, _NO_ROWS
        if len(longer):
            blocks = self._blocks[:, longer, self._num_new[longer] - 1]
            starts, ones = self._num_blocks[longer] - 1, np.ones(len(longer), dtype=np.int64)
            appended = [(group, RowWrites(longer, starts, ones, ids)) for group, ids in enumerate(blocks)]
        rows = self._steady
        computed = self._computed[rows]
        self._computed[rows] = computed + 1
        return SteadyStep(self._owners[rows], rows, computed, self._entries[rows]), grown, appended

    def take(
        self, step: SteadyStep, tokens: list[int], faults: list[int]
    ) -> tuple[list[str], list[int], list[tuple[Sequence, int, ScheduledRow]]]:
        """The tokens that the step has brought; `faults`: rows without a good one. Returns request ids and their
        tokens, and what is left to the caller: sequences that have left since, and those that leave now because of a
        stop token or a fault."""
        found, rows = np.array(tokens, dtype=np.int32), step.rows
        plain = self._entries[rows] == step.entries
        if not self._stop_tokens.keys().isdisjoint(tokens):
            stops = (token in seq.stop_token_ids for seq, token in zip(step.owners, tokens))
            plain &= ~np.fromiter(stops, dtype=bool, count=len(tokens))
        if faults:
            plain &= ~np.isin(rows, faults)
        special = []
        if not plain.all():
            for index in np.flatnonzero(~plain).tolist():
                seq = step.owners[index]
                if seq.steady and self._entries[rows[index]] == step.entries[index]:
                    self.leave(seq)
                row = ScheduledRow(int(rows[index]), int(step.computed[index]), 1, samples=True)
                special.append((seq, tokens[index], row))
            rows, found = rows[plain], found[plain]
            tokens = found.tolist()
        places = self._num_recent[rows]
        self._recent[rows, places] = found
        self._num_recent[rows] = places + 1
        return self._request_ids[rows].tolist(), tokens, special

    @property
    def _steady(self) -> np.ndarray:
        if self._rows is None:
            self._rows = np.flatnonzero(self._entries)
        return self._rows
