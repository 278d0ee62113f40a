"""Sequences that decode, in columns by row: planning them and taking their tokens are a few array operations a step,
however many they are.

A sequence enters when a step was planned that samples, and nothing but one token in every step is to be expected of it;
it leaves before anything else happens to it: it ends, finds no room, or is preempted or aborted. Meanwhile its newest
tokens and how far it is computed are here; `leave` brings them back. Only where its last block is full, or a window
leaves a block behind, it is looked at for itself.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass

import numpy as np

from engine.kv_cache.kv_cache import NO_GROWTH, Growth, KVCache
from engine.scheduling.sequence import Sequence
from engine.step import ScheduledRow

_MOST_IN_FLIGHT = 8
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
    def __init__(self, num_rows: int, kv: KVCache) -> None:
        self._kv = kv
        self._owners = np.full(num_rows, None, dtype=object)
        self._request_ids = np.full(num_rows, None, dtype=object)
        self._computed = np.zeros(num_rows, dtype=np.int32)
        self._until = np.zeros(num_rows, dtype=np.int32)
        """`computed` at which its owner is to be looked at"""
        self._entries = np.zeros(num_rows, dtype=np.int64)
        """when its owner entered, in order; 0: it is not steady"""
        self._stop_tokens: Counter[int] = Counter()
        """of all owners: how many have it"""
        self._recent = np.zeros((num_rows, kv.block_size + _MOST_IN_FLIGHT), dtype=np.int32)
        """tokens that arrived since its owner entered or caught up: those of a block, and of steps in flight"""
        self._num_recent = np.zeros(num_rows, dtype=np.int64)
        self._grown: dict[int, Growth] = {}
        """by row: what the device was not told of its block table"""
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
        seq.steady = True
        self._until[row] = min(seq.blocks.quiet_until, seq.max_total - 2)
        seq.waits = True
        self._rows, self._count = None, self._count + 1

    def _catch_up(self, rows: np.ndarray) -> None:
        """Their owners' fields hold what has happened to them so far."""
        counts = self._num_recent[rows]
        recent = self._recent[rows, : counts.max()].tolist()
        self._num_recent[rows] = 0
        for seq, tokens, count, computed in zip(
            self._owners[rows], recent, counts.tolist(), self._computed[rows].tolist(), strict=True
        ):
            seq.tokens += tokens[:count]
            seq.computed = seq.blocks.num_tokens = computed
            seq.in_flight = computed + 1 - len(seq.tokens)

    def leave(self, seq: Sequence) -> None:
        """Its fields hold what has happened to it, for good."""
        self._catch_up(np.array([seq.row]))
        seq.steady = seq.waits = False
        self._entries[seq.row] = 0
        seq.moved = self._grown.pop(seq.row, NO_GROWTH)
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
        if not len(rows):
            return
        self._catch_up(rows)
        usual: list[Sequence] = []
        for seq in self._owners[rows].tolist():
            blocks = seq.blocks
            if seq.computed + 2 >= seq.max_total:
                self.leave(seq)
                continue
            self._kv.register(blocks, seq.tokens)  # not what the next step fills: it may not come to that
            if self._kv.slides or seq.computed != blocks.num_blocks * self._kv.block_size:
                self._grow(seq, self._kv.append(blocks, seq.computed + 1))
            else:
                usual.append(seq)
        growths = self._kv.append_one([seq.blocks for seq in usual]) if usual else []
        for index, seq in enumerate(usual):
            self._grow(seq, growths[index] if growths is not None else self._kv.append(seq.blocks, seq.computed + 1))

    def _grow(self, seq: Sequence, growth: Growth | None) -> None:
        if growth is None:
            self.leave(seq)
            return
        self._until[seq.row] = min(seq.blocks.quiet_until, seq.max_total - 2)
        if growth is not NO_GROWTH:
            self._grown[seq.row] = growth

    def place(self) -> tuple[SteadyStep, list[tuple[int, Growth]]]:
        """All of them compute a token in the step that is planned. Returns also what the device is to be told: rows and
        the growth of their block tables."""
        grown = list(self._grown.items())
        self._grown.clear()
        rows = self._steady
        computed = self._computed[rows]
        self._computed[rows] = computed + 1
        return SteadyStep(self._owners[rows], rows, computed, self._entries[rows]), grown

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
