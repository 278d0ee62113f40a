"""A step while it is being decided. Until a row is placed its sequence may still be preempted and its share taken
back."""

from __future__ import annotations

import numpy as np

from engine.kv_cache.host_tier import Transfers
from engine.kv_cache.sequence_blocks import NO_GROWTH, Growth
from engine.scheduling.running_rows import RunningRows
from engine.scheduling.sequence import Sequence
from engine.scheduling.steps_in_flight import PlannedStep
from engine.step import NewRow, Rows, ScheduledRow, StepPlan, Write, Writes

_Placed = list[tuple[Sequence, ScheduledRow]]


class StepDraft:
    """Collects one `StepPlan`."""

    def __init__(self, budget: int, rows: RunningRows, plain: np.ndarray) -> None:
        """`plain`: from `RunningRows.split`."""
        self._rows = rows
        self.plain = plain
        self.budget = budget - len(plain)
        """tokens that the step may still take"""
        self.tentative: dict[Sequence, tuple[int, Growth]] = {}
        """query length and growth of other running sequences, in the order of decision; takes budget, changes no
        sequence"""
        self._plain_computed = plain[:0]
        self._decodes: _Placed = []
        self._prefills: _Placed = []
        self._added: list[NewRow] = []
        self._started: list[Sequence] = []
        self._rewrites: list[Write] = []
        self._drafts: list[Write] = []
        self._appends: list[Write] = []
        self.copies: list[tuple[int, int]] = []

    def give_back(self, victims: list[Sequence]) -> None:
        """They were preempted; what they had of this step, others may have."""
        for seq in victims:
            if seq in self.tentative:
                self.budget += self.tentative.pop(seq)[0]
        still = self._rows.ready[self.plain]
        self.budget += len(still) - int(np.count_nonzero(still))
        self.plain = self.plain[still]

    def place_plain(self) -> None:
        """Final for all of them."""
        self._plain_computed = self._rows.advance_plain(self.plain)

    def start_row(self, seq: Sequence) -> None:
        """The row is new on the device: it needs every known token, and the block table from entry 0 on."""
        new = NewRow(
            row=seq.row,
            token_ids=seq.tokens.copy(),
            prompt_len=seq.prompt_len,
            params=seq.params,
            adapter_slot=seq.slot,
            cache_salt=seq.cache_salt,
        )
        table = Growth(0, [table.copy() for table in seq.blocks.tables], [])
        self._added.append(new)
        self._started.append(seq)
        self._append_blocks(seq.row, table)
        seq.rewrite_from, seq.moved, seq.new_row = None, NO_GROWTH, False

    def drop(self) -> None:
        """The draft becomes no plan: the device is not told of the rows that were to start."""
        for seq in self._started:
            seq.new_row = seq.row >= 0

    def tell(self, seq: Sequence, growth: Growth) -> None:
        """What the device has to know of the sequence before it computes."""
        if seq.new_row:
            self.start_row(seq)
            self.copies.extend(growth.copies)
            return
        start = seq.rewrite_from
        if start is not None:
            self._rewrites.append(Write(0, seq.row, start, seq.tokens[start:]))
            seq.rewrite_from = None
        if seq.moved is not NO_GROWTH:
            self._append_blocks(seq.row, seq.moved)
            seq.moved = NO_GROWTH
        if growth is not NO_GROWTH:
            self._append_blocks(seq.row, growth)

    def add(self, seq: Sequence, row: ScheduledRow, may_fork: bool) -> None:
        """Final. Forks may follow only if it ``may_fork``."""
        if row.samples > 1 and seq.drafts:
            del seq.drafts[row.samples - 1 :]
            self._drafts.append(Write(0, row.row, row.computed + row.query_len - len(seq.drafts), seq.drafts))
        decodes = row.query_len == row.samples and not may_fork
        (self._decodes if decodes else self._prefills).append((seq, row))

    def _append_blocks(self, row: int, growth: Growth) -> None:
        for group, ids in enumerate(growth.block_ids):
            if ids:
                self._appends.append(Write(group, row, growth.start, ids))
        if growth.copies:
            self.copies.extend(growth.copies)

    def planned(self) -> PlannedStep:
        """Decode rows first."""
        plain, others = len(self.plain), self._decodes + self._prefills
        columns = np.ones((5, plain + len(others)), dtype=np.int32)
        columns[0, :plain], columns[1, :plain] = self.plain, self._plain_computed
        columns[4, :plain] = self._rows.unsure[self.plain]
        owners = np.empty(columns.shape[1], dtype=object)
        owners[:plain] = self._rows.owners[self.plain]
        if others:
            sequences, rows = zip(*others, strict=True)
            columns[:, plain:] = np.array(rows, dtype=np.int32).T
            owners[plain:] = sequences
        masked: list[int] = []
        if self._rows.masked.any():
            masked = np.flatnonzero(self._rows.masked[columns[0]] & (columns[3] > 0)).tolist()
        return PlannedStep(Rows(columns), owners, self._rows.entries[self.plain], masked)

    def plan(
        self,
        step_id: int,
        step: PlannedStep,
        released: list[int],
        transfers: tuple[Transfers, Transfers],
        bundles: tuple[list[list[int]], list[int]],
    ) -> StepPlan:
        """`step`: of this draft. `transfers`: to the host tier, and from it. `bundles`: new ones, and blocks to
        clean."""
        return StepPlan(
            step_id=step_id,
            rows=step.rows,
            released=released,
            added=self._added,
            rewrites=Writes.of(self._rewrites),
            drafts=Writes.of(self._drafts),
            block_appends=Writes.of(self._appends),
            block_copies=self.copies,
            swap_out=transfers[0],
            swap_in=transfers[1],
            bundles=bundles[0],
            cleaned=bundles[1],
            masked=step.masked,
        )
