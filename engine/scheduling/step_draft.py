"""A step while it is being decided. Until a row is placed its sequence may still be preempted and its share taken
back."""

from __future__ import annotations

from engine.kv_cache.host_tier import Transfers
from engine.kv_cache.kv_cache import NO_GROWTH, Growth
from engine.row_writes import BlockAppends, RowWrites, TokenRewrites
from engine.scheduling.sequence import Sequence
from engine.scheduling.steady_rows import SteadyRows, SteadyStep
from engine.scheduling.steady_searches import SearchesStep, SearchTable
from engine.scheduling.steps_in_flight import PlannedRows, Rows
from engine.step import BlockAppend, NewRow, ScheduledRow, StepPlan, TokenRewrite


class StepDraft:
    """Collects one `StepPlan`."""

    __slots__ = (
        "_added",
        "_appended",
        "_appends",
        "_copies",
        "_decodes",
        "_prefills",
        "_rewrites",
        "_rewritten",
        "_started",
        "budget",
        "searches",
        "steady",
        "tentative",
    )

    def __init__(self, budget: int) -> None:
        self.budget = budget
        """tokens that the step may still take"""
        self.tentative: dict[Sequence, tuple[int, Growth]] = {}
        """query length and growth of running sequences, in the order of decision; takes budget, changes no sequence"""
        self.steady: SteadyStep | None = None
        """as placed; None: there are none"""
        self.searches: list[SearchesStep] = []
        """as placed"""
        self._decodes: Rows = []
        self._prefills: Rows = []
        self._added: list[NewRow] = []
        self._started: list[Sequence] = []
        self._rewrites: list[TokenRewrite] = []
        self._rewritten: list[tuple[int, RowWrites]] = []
        self._appends: list[BlockAppend] = []
        self._appended: list[tuple[int, RowWrites]] = []
        self._copies: list[tuple[int, int]] = []

    def give_back(self, seq: Sequence) -> None:
        """The sequence was preempted; if it had a share of this step, others may have it."""
        if seq in self.tentative:
            self.budget += self.tentative.pop(seq)[0]

    def place_steady(self, rows: SteadyRows) -> None:
        """Final for all of them."""
        if rows:
            self.steady, grown, appended = rows.place()
            self._appended += appended
            for row, growth in grown:
                self._append_blocks(row, growth)

    def place_searches(self, tables: list[SearchTable]) -> None:
        """Final for all that are ready."""
        for table in tables:
            if table.num_ready:
                step, news = table.place()
                self.searches.append(step)
                if news.rewrites:
                    self._rewritten.append((0, news.rewrites))
                if news.appends:
                    self._appended.append((0, news.appends))
                for seq in news.beams:
                    self._tell(seq, NO_GROWTH)
                self._copies += news.copies

    def start_row(self, seq: Sequence) -> None:
        """The row is new on the device: it needs every known token, and the block table from entry 0 on."""
        new = NewRow(row=seq.row, token_ids=seq.tokens.copy(), prompt_len=seq.prompt_len, params=seq.params)
        table = Growth(0, [table.copy() for table in seq.blocks.tables], [])
        self._added.append(new)
        self._started.append(seq)
        self._append_blocks(seq.row, table)
        seq.rewrite_from, seq.moved, seq.new_row = None, NO_GROWTH, False

    def drop(self) -> None:
        """The draft becomes no plan: the device is not told of the rows that were to start."""
        for seq in self._started:
            seq.new_row = seq.row >= 0

    def _tell(self, seq: Sequence, growth: Growth) -> None:
        """What the device has to know of the sequence beside its growth."""
        if seq.new_row:
            self.start_row(seq)
            self._copies.extend(growth.copies)
            return
        start = seq.rewrite_from
        if start is not None:
            self._rewrites.append(TokenRewrite(seq.row, start, seq.tokens[start:]))
            seq.rewrite_from = None
        if seq.moved is not NO_GROWTH:
            self._append_blocks(seq.row, seq.moved)
            seq.moved = NO_GROWTH
        if growth is not NO_GROWTH:
            self._append_blocks(seq.row, growth)

    def place(self, seq: Sequence, query_len: int, growth: Growth, may_fork: bool) -> bool:
        """Final: the sequence computes ``query_len`` tokens in this step. Returns whether it samples; only then forks
        may follow, if it ``may_fork``."""
        if seq.new_row or seq.rewrite_from is not None or growth is not NO_GROWTH:
            self._tell(seq, growth)
        computed = seq.computed
        seq.computed = computed + query_len
        samples = seq.computed == len(seq.tokens) + seq.in_flight
        row = ScheduledRow(seq.row, computed, query_len, samples)
        if samples:
            seq.sampled()
        (self._decodes if samples and query_len == 1 and not may_fork else self._prefills).append((seq, row))
        return samples

    def place_beam(self, seq: Sequence, growth: Growth) -> None:
        """Final, as `place`: after a choice the beam computes its new token; its row is not new."""
        self._tell(seq, growth)
        computed = seq.computed
        self._decodes.append((seq, ScheduledRow(seq.row, computed, 1, samples=True)))
        seq.computed = computed + 1
        seq.in_flight += 1
        seq.waits = True

    def fork(self, seq: Sequence) -> None:
        """The sequence samples, too, from the logits of the one placed last, on a row of its own."""
        self.start_row(seq)
        row = ScheduledRow(seq.row, seq.computed, 0, samples=True)
        self._prefills.append((seq, row))

    def _append_blocks(self, row: int, growth: Growth) -> None:
        for group, ids in enumerate(growth.block_ids):
            self._appends.append(BlockAppend(row, group, growth.start, ids))
        if growth.copies:
            self._copies.extend(growth.copies)

    @property
    def rows(self) -> PlannedRows:
        """Decode rows first."""
        return PlannedRows(self.steady, self.searches, self._decodes + self._prefills)

    def plan(
        self, step_id: int, rows: PlannedRows, released: list[int], transfers: tuple[Transfers, Transfers]
    ) -> StepPlan:
        """`rows`: of this draft. `transfers`: to the host tier, and from it."""
        return StepPlan(
            step_id=step_id,
            rows=rows.scheduled,
            released=released,
            added=self._added,
            rewrites=TokenRewrites(self._rewrites, self._rewritten) if self._rewritten else self._rewrites,
            block_appends=BlockAppends(self._appends, self._appended) if self._appended else self._appends,
            block_copies=self._copies,
            swap_out=transfers[0],
            swap_in=transfers[1],
        )
