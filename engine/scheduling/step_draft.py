"""A step while it is being decided. Until a row is placed its sequence may still be preempted and its share taken
back."""

from __future__ import annotations

from engine.kv_cache.host_tier import Transfers
from engine.kv_cache.kv_cache import NO_GROWTH, Growth
from engine.scheduling.sequence import Sequence
from engine.step import BlockAppend, NewRow, ScheduledRow, StepPlan, TokenRewrite


class StepDraft:
    """Collects one `StepPlan`."""

    __slots__ = ("_added", "_appends", "_copies", "_decodes", "_prefills", "_rewrites", "budget", "tentative")

    def __init__(self, budget: int) -> None:
        self.budget = budget
        """tokens that the step may still take"""
        self.tentative: dict[Sequence, tuple[int, Growth]] = {}
        """query length and growth of running sequences, in the order of decision; takes budget, changes no sequence"""
        self._decodes: list[tuple[Sequence, ScheduledRow]] = []
        self._prefills: list[tuple[Sequence, ScheduledRow]] = []
        self._added: list[NewRow] = []
        self._rewrites: list[TokenRewrite] = []
        self._appends: list[BlockAppend] = []
        self._copies: list[tuple[int, int]] = []

    def take(self, seq: Sequence, query_len: int, growth: Growth) -> None:
        self.tentative[seq] = (query_len, growth)
        self.budget -= query_len

    def give_back(self, seq: Sequence) -> None:
        """The sequence was preempted; if it had a share of this step, others may have it."""
        query_len, _ = self.tentative.pop(seq, (0, None))
        self.budget += query_len

    def start_row(self, seq: Sequence) -> None:
        """The row is new on the device: it needs every known token, and the block table from entry 0 on."""
        self._added.append(
            NewRow(row=seq.row, token_ids=seq.tokens.copy(), prompt_len=seq.prompt_len, params=seq.params)
        )
        self._append_blocks(seq, _whole_table(seq, NO_GROWTH))
        seq.rewrite_from, seq.moved, seq.new_row = None, False, False

    def _rewrite(self, seq: Sequence, growth: Growth) -> None:
        """The row belongs to the sequence, which has another history now."""
        start = seq.rewrite_from or 0
        self._rewrites.append(TokenRewrite(row=seq.row, start=start, token_ids=seq.tokens[start:]))
        self._append_blocks(seq, _whole_table(seq, growth) if seq.moved else growth)
        seq.rewrite_from, seq.moved = None, False

    def place(self, seq: Sequence, query_len: int, growth: Growth, may_fork: bool) -> bool:
        """Final: the sequence computes ``query_len`` tokens in this step. Returns whether it samples; only then forks
        may follow, if it ``may_fork``."""
        if seq.new_row:
            self.start_row(seq)
            self._copies.extend(growth.copies)
        elif seq.rewrite_from is not None:
            self._rewrite(seq, growth)
        elif growth.block_ids:
            self._append_blocks(seq, growth)
        samples = query_len == seq.remaining
        row = ScheduledRow(row=seq.row, computed=seq.computed, query_len=query_len, samples=samples)
        decodes = samples and query_len == 1 and not may_fork
        (self._decodes if decodes else self._prefills).append((seq, row))
        return samples

    def fork(self, seq: Sequence) -> None:
        """The sequence samples, too, from the logits of the one placed last, on a row of its own."""
        self.start_row(seq)
        row = ScheduledRow(row=seq.row, computed=seq.computed, query_len=0, samples=True)
        self._prefills.append((seq, row))

    def _append_blocks(self, seq: Sequence, growth: Growth) -> None:
        for group, ids in enumerate(growth.block_ids):
            self._appends.append(BlockAppend(row=seq.row, group=group, start=growth.start, block_ids=ids))
        self._copies.extend(growth.copies)

    @property
    def rows(self) -> list[tuple[Sequence, ScheduledRow]]:
        """Decode rows first."""
        return self._decodes + self._prefills

    def plan(self, step_id: int, released: list[int], transfers: tuple[Transfers, Transfers]) -> StepPlan:
        """`transfers`: to the host tier, and from it."""
        return StepPlan(
            step_id=step_id,
            rows=[row for _, row in self.rows],
            released=released,
            added=self._added,
            rewrites=self._rewrites,
            block_appends=self._appends,
            block_copies=self._copies,
            swap_out=transfers[0],
            swap_in=transfers[1],
        )


def _whole_table(seq: Sequence, growth: Growth) -> Growth:
    return Growth(start=0, block_ids=[table.copy() for table in seq.blocks.tables], copies=growth.copies)
