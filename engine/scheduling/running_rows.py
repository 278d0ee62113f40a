"""Who holds a row of the device tables, which rows are free, and what changes of a running sequence with every step: in
columns by row, so that planning a thousand that decode, and taking their tokens, are a few array operations.

Positions below `computed` have KV, or will when the planned steps have run. `known` counts tokens in flight, too, so
the next token can be sampled when `computed` reaches it. A row is `alone` where the next step is more for it than one
token in a block of its own: something is to be told to the device, or others are to be forked from it. It is not
`ready` where nothing can be computed before a choice among beams.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections import Counter

import numpy as np

from engine.scheduling.beam_group import BeamGroup
from engine.scheduling.micro_batches import in_turn
from engine.scheduling.sequence import Sequence, Status


class RunningRows:
    def __init__(
        self, num_rows: int, exact: bool = False, stages: int = 1, row_tokens: int = 1, states: bool = False
    ) -> None:
        """`exact`: nothing is planned of a sequence before it is known how many of its drafts were right; nor is it
        where sequences have `states`. With several `stages` nothing is before its token has arrived, and a step gets a
        share of those that decode (`micro_batches.py`; `row_tokens` as there)."""
        self._exact, self._stages, self._row_tokens, self._states = exact or states, stages, row_tokens, states
        self.sequences: list[Sequence] = []
        """sorted by key, so the last one is the first to be preempted; changed by `enter` and `leave` alone"""
        self.owners = np.full(num_rows, None, dtype=object)
        """the sequences"""
        self.request_ids = np.full(num_rows, None, dtype=object)
        self.entries = np.zeros(num_rows, dtype=np.int64)
        """when its owner came, in order; 0: nobody has it"""
        self.computed = np.zeros(num_rows, dtype=np.int32)
        self.known = np.zeros(num_rows, dtype=np.int32)
        self.limits = np.zeros(num_rows, dtype=np.int32)
        """`known` at which its owner is not planned again"""
        self.room = np.zeros(num_rows, dtype=np.int32)
        """`computed` up to which its blocks need no look"""
        self.ready = np.zeros(num_rows, dtype=bool)
        self.alone = np.zeros(num_rows, dtype=bool)
        self.detailed = np.zeros(num_rows, dtype=bool)
        """more than a token comes back of it: log-probabilities, or candidates"""
        self.masked = np.zeros(num_rows, dtype=bool)
        """its owner samples what a grammar allows"""
        self.drafts = np.zeros(num_rows, dtype=np.int32)
        """how many its owner's next step computes"""
        self.unsure = np.zeros(num_rows, dtype=np.int32)
        """drafts in flight: `computed` and `known` are that much too large if all are wrong"""
        self.untaken = np.zeros(num_rows, dtype=np.int32)
        """of `computed`, drafts of its owner's last step: states take those that were right in with the next one"""
        self.pause = np.zeros(num_rows, dtype=np.int32)
        """steps for which no drafts are looked for"""
        self.looks = np.zeros((num_rows, 2))
        """of its owner's latest drafts: how many were right, of how many it is known"""
        self.turns = np.zeros(num_rows, dtype=np.int64)
        """in which plan it was last"""
        self._turn = 0
        self.stop_tokens: Counter[int] = Counter()
        """of all owners: how many have it"""
        self._num_entries = 0
        self.free = list(range(num_rows - 1, -1, -1))  # but for those that are reserved
        self._released: list[int] = []

    # -- coming and going --------------------------------------------------------------------------------------------

    def reserve(self, group: BeamGroup) -> None:
        """A row for each member but one, which `enter` will take."""
        group.spare_rows = [self.free.pop() for _ in group.members[1:]]

    def give_back(self, group: BeamGroup) -> None:
        self.free += group.spare_rows
        group.spare_rows = []

    def enter(self, seq: Sequence, computed: int) -> None:
        """The sequence runs, on a row of its group's or any free one."""
        reserved = seq.group.spare_rows if seq.group is not None else []
        row = seq.row = reserved.pop() if reserved else self.free.pop()
        if seq.account is not None:
            seq.account.rows += 1
        seq.status, seq.new_row = Status.RUNNING, True
        self._num_entries += 1
        self.entries[row] = self._num_entries
        self.owners[row], self.request_ids[row] = seq, seq.request_id
        self.limits[row], self.room[row] = seq.max_total, 0
        self.masked[row] = seq.matcher is not None
        self.detailed[row] = seq.params.logprobs is not None or seq.params.pooling is not None
        self.stop_tokens.update(seq.stop_token_ids)
        self.go_on(seq, computed)
        insort(self.sequences, seq, key=_key)

    def go_on(self, seq: Sequence, computed: int) -> None:
        """As many of its tokens, which have all arrived, are computed; it is ready."""
        row = seq.row
        self.computed[row], self.known[row] = computed, len(seq.tokens)
        self.ready[row] = self.alone[row] = True

    def leave(self, seq: Sequence) -> None:
        """Its row is free, or its group's again."""
        row = seq.row
        self.settle_blocks(seq)
        seq.in_flight = self.in_flight(seq)
        self.entries[row] = 0
        self.owners[row] = self.request_ids[row] = None
        self.ready[row] = False
        self.drafts[row] = self.unsure[row] = self.untaken[row] = self.pause[row] = self.looks[row] = 0
        for token in seq.stop_token_ids:
            self.stop_tokens[token] -= 1
            if not self.stop_tokens[token]:
                del self.stop_tokens[token]
        del self.sequences[bisect_left(self.sequences, seq.key, key=_key)]
        (self.free if seq.group is None else seq.group.spare_rows).append(row)
        if seq.account is not None:
            seq.account.rows -= 1
        if not seq.new_row:
            self._released.append(row)
        seq.row, seq.new_row = -1, False

    def settle(self, group: BeamGroup, idle: list[Sequence]) -> None:
        """After a choice: members that are `idle` leave, those that carry a beam go on, or enter."""
        for member in idle:
            if member.status is Status.RUNNING:
                self.leave(member)
                member.status = Status.FOLLOWING
        for beam in group.beams:
            (self.go_on if beam.status is Status.RUNNING else self.enter)(beam, len(beam.tokens) - 1)

    def take_released(self) -> list[int]:
        """Rows that were left since the last call."""
        released, self._released = self._released, []
        return released

    # -- one of them -------------------------------------------------------------------------------------------------

    def remaining(self, seq: Sequence) -> int:
        """Tokens to compute until the next one can be sampled."""
        return int(self.known[seq.row] - self.computed[seq.row])

    def in_flight(self, seq: Sequence) -> int:
        """Tokens that planned steps sample and that have not arrived."""
        return seq.in_flight if seq.row < 0 else int(self.known[seq.row]) - len(seq.tokens)

    def arrived(self, seq: Sequence, count: int = 1) -> None:
        """As many of them have, or never will; none is a token of the sequence's yet."""
        if seq.row < 0:
            seq.in_flight -= count
        else:
            self.known[seq.row] -= count

    def append(self, seq: Sequence, token: int) -> None:
        """One that has arrived is the sequence's next."""
        seq.tokens.append(token)
        if (row := seq.row) >= 0:
            self.known[row] += 1
            if self._stages > 1:
                self.ready[row] = self.known[row] < self.limits[row]

    def appended(self, rows: np.ndarray) -> None:
        """A token of each has arrived, which is not its last one."""
        if self._stages > 1:
            self.ready[rows] = True

    def settle_blocks(self, seq: Sequence) -> None:
        """Its blocks hold what it has computed: those that decode are not told at every step."""
        unsure = self.untaken if self._states else self.unsure
        seq.blocks.num_tokens, seq.blocks.unsure = int(self.computed[seq.row]), int(unsure[seq.row])

    def drop_drafts(self, seq: Sequence) -> None:
        """What is not certain, or in no state, does not count as computed: the sequence is to leave the device."""
        self.settle_blocks(seq)
        self.computed[seq.row] -= seq.blocks.unsure
        self.unsure[seq.row] = self.untaken[seq.row] = 0
        self.settle_blocks(seq)

    def advance(self, seq: Sequence, query_len: int) -> int:
        """The sequence is in the step that is planned with as many tokens, drafts behind those that are known. Returns
        at how many positions it samples. Then it waits if that may have been its last token, a beam for the others'
        candidates, and who computes drafts for what comes of them, if somebody has to know. `watch` comes behind it."""
        row = seq.row
        self.computed[row] += query_len
        samples = max(int(self.computed[row] - self.known[row]) + 1, 0)
        if samples:
            self.known[row] += samples
            self.drafts[row] = 0
            self.unsure[row] += samples - 1
            self.untaken[row] = samples - 1
            self.turns[row] = self._turn
            waits = self._stages > 1 or (self.unsure[row] and (self._exact or seq.matcher is not None))
            self.ready[row] = self.known[row] < self.limits[row] and seq.group is None and not waits
        return samples

    def reconcile(self, seq: Sequence, samples: int, brought: int) -> None:
        """Of the drafts that a sequence has computed at as many `samples` all but `brought` - 1 were wrong: it goes on
        behind the others. None of the tokens is its own yet."""
        row = seq.row
        self.computed[row] -= samples - brought
        self.unsure[row] -= samples - 1
        self.untaken[row] -= samples - brought
        self.ready[row] = self.known[row] + brought < self.limits[row]

    def watch(self, seq: Sequence) -> None:
        """The device knows of it; when is it to be looked at again?"""
        self.room[seq.row] = seq.blocks.quiet_until
        half_way = self.computed[seq.row] < len(seq.tokens)  # its first token brings more than others do
        self.alone[seq.row] = half_way or seq.group is not None or bool(seq.followers)

    # -- all of them -------------------------------------------------------------------------------------------------

    def split(self, budget: int) -> tuple[np.ndarray, list[Sequence]]:
        """Those that run and are ready: rows of which the next step is one token in a block of their own, and all
        other sequences, in order. `budget`: tokens that a step may have; where it may not do for all, all are others.
        """
        self._turn += 1
        ready = np.flatnonzero(self.ready)
        if self._stages > 1:
            ready = self._in_turn(ready)
        computed = self.computed[ready]
        plain = (self.known[ready] - computed == 1) & (computed < self.room[ready]) & ~self.alone[ready]
        if self.drafts.any():
            plain &= self.drafts[ready] == 0
        if len(ready) > budget:
            plain[:] = False
        if plain.all():
            return ready, []
        return ready[plain], sorted(self.owners[ready[~plain]].tolist(), key=_key)

    def _in_turn(self, ready: np.ndarray) -> np.ndarray:
        """Without those that decode in another step."""
        decodes = self.known[ready] - self.computed[ready] == 1
        decoding = ready[decodes]
        others = np.flatnonzero((self.entries > 0) & ~self.ready)
        in_flight = int(self.computed[others].sum()) + self._row_tokens * len(others)
        chosen = in_turn(self.turns[decoding], self.computed[decoding] + self._row_tokens, in_flight, self._stages)
        decodes[decodes] = ~chosen
        chosen_now: np.ndarray = ready[~decodes]
        return chosen_now

    def advance_plain(self, rows: np.ndarray) -> np.ndarray:
        """Rows from `split` are in the step that is planned. Returns what they had computed."""
        computed: np.ndarray = self.computed[rows]
        known = self.known[rows] + 1
        self.computed[rows], self.known[rows], self.untaken[rows] = computed + 1, known, 0
        self.ready[rows] = (known < self.limits[rows]) & (self._stages == 1)
        self.turns[rows] = self._turn
        return computed


def _key(seq: Sequence) -> tuple[int, int]:
    return seq.key
