"""Random histories of sequences whose layers keep states beside keys and values, against a device of plain lists: what
each step reads is what the tokens before it made, in whatever order its rows are computed."""

from __future__ import annotations

import random
from collections import Counter

import pytest
from hypothesis import seed, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)

from engine.kv_cache.block_pool import NO_BLOCK
from engine.kv_cache.kv_cache import KVCache
from engine.kv_cache.sequence_blocks import NO_GROWTH, Growth, SequenceBlocks
from engine.kv_cache.swapping import Leaving, blocks_to_swap_in, swap_in, swap_out
from engine.kv_cache.take_over import take_over
from engine.layer_groups import State, pages_of

MAX_QUERY_LEN = 9
picks = st.integers(0, 5)
texts = st.lists(st.integers(0, 1), min_size=1, max_size=MAX_QUERY_LEN) | st.integers(1, 9).map(lambda n: [0] * n)


class Seq:
    def __init__(self, blocks: SequenceBlocks, tokens: list[int]) -> None:
        self.blocks, self.tokens = blocks, tokens
        self.computed = self.taken = blocks.num_tokens
        """of these, those that the state has taken in; drafts behind them were right"""
        self.drafts = 0
        """of `query`, or of what was computed last"""
        self.growth: Growth = NO_GROWTH
        self.query: list[int] | None = None
        """what the plan computes of it"""


class States(RuleBasedStateMachine):
    def __init__(self, done: Counter[str]) -> None:
        super().__init__()
        self.done = done

    @initialize(
        num_blocks=st.integers(4, 40),
        size=st.sampled_from([1, 2, 3]),
        pages=st.integers(1, 3),
        every=st.integers(1, 4),
        windows=st.sampled_from([(None,), (None,), (None, 3)]),
        host=st.sampled_from([0, 6, 30]),
        events=st.booleans(),
        seed=st.integers(0, 99),
    )
    def start(
        self,
        num_blocks: int,
        size: int,
        pages: int,
        every: int,
        windows: tuple[int | None, ...],
        host: int,
        events: bool,
        seed: int,
    ) -> None:
        kinds = (*windows, State(pages, every * size))
        self.kv = KVCache(num_blocks, size, True, kinds, MAX_QUERY_LEN, host, events)
        self.size, self.group, self.rng = size, len(windows), random.Random(seed)
        self.seqs: list[Seq] = []
        self.ended: list[list[int]] = []
        self.device: list[object] = [{} for _ in range(num_blocks)]
        """of each page: position → tokens up to there, of keys and values; or (tokens, part of the state)"""
        self.host: list[object] = [None] * host
        self.parts: dict[int, list[int]] = {}
        self.copies: list[tuple[int, int]] = []
        self.gave_way = False
        """somebody, in the plan that is being made: nobody starts or comes back in it (`Scheduler._draft`), where he
        might be given what is to be copied first"""

    # -- the device --------------------------------------------------------------------------------------------------

    def tell(self) -> None:
        """The plan is applied, and its step computed."""
        out, into = self.kv.take_transfers()
        bundles, uncleaned = self.kv.states.told([*self.copies, *into])
        self.parts |= {blocks[0]: blocks for blocks in bundles}
        for source, there in out:
            self.host[there] = self._copy(self.device[source])
        for source, there in into:
            self.device[there] = self._copy(self.host[source])
        for source, there in self.copies:
            self.device[there] = self._copy(self.device[source])
        for block in uncleaned:
            self.device[block] = {}
        self.copies, self.gave_way = [], False
        rows = [seq for seq in self.seqs if seq.query is not None]
        self.rng.shuffle(rows)
        for seq in rows:
            self._write_keys(seq)
        for seq in rows:
            self._compute(seq)

    @staticmethod
    def _copy(page: object) -> object:
        return dict(page) if isinstance(page, dict) else page

    def _write_keys(self, seq: Seq) -> None:
        """In every layer all rows do before any reads."""
        assert seq.query is not None
        for table in seq.blocks.tables[: self.group]:
            for position in range(seq.computed, seq.computed + len(seq.query)):
                page = self.device[table[position // self.size]]
                assert isinstance(page, dict), "keys and values lie over what is left of a state"
                page[position % self.size] = tuple(seq.tokens[: position + 1])

    def _compute(self, seq: Seq) -> None:
        assert seq.query is not None
        table, begin, end = seq.blocks.tables[self.group], seq.taken, seq.computed + len(seq.query)
        known = seq.tokens[:end]
        assert known[seq.computed :] == seq.query
        if begin:
            self._reads(table[(begin - 1) // self.size], tuple(known[:begin]))
        for group in range(self.group):
            first = 0 if self.kv.windows[group] is None else max(seq.computed - 2, 0)
            for position in range(first, end):
                page = self.device[seq.blocks.tables[group][position // self.size]]
                assert isinstance(page, dict)
                assert page[position % self.size] == tuple(known[: position + 1]), "keys and values are lost"
        seq.taken = end - seq.drafts
        for index in range(begin // self.size, -(-seq.taken // self.size)):
            if table[index] != NO_BLOCK:
                upto = min((index + 1) * self.size, seq.taken)
                assert self.kv.pool.ref_counts[table[index]] == 1, "a write to a shared state"
                for part, block in enumerate(self.parts[table[index]]):
                    self.device[block] = (tuple(known[:upto]), part)
        seq.computed, seq.query = end - self.rng.randint(0, seq.drafts), None
        if seq.drafts:
            self.done["right"] += seq.computed > seq.taken
            self.kv.trim(seq.blocks, seq.computed)
        seq.blocks.unsure = seq.computed - seq.taken

    def _reads(self, first: int, tokens: tuple[int, ...]) -> None:
        assert first != NO_BLOCK, "a step begins where no state is kept"
        for part, block in enumerate(self.parts[first]):
            assert self.device[block] == (tokens, part), "a step reads another state than its tokens made"

    # -- rules -------------------------------------------------------------------------------------------------------

    def on_device(self, pick: int) -> Seq | None:
        there = [seq for seq in self.seqs if not seq.blocks.on_host and seq.query is None]
        return there[-1 - pick % len(there)] if there else None

    def at_rest(self, pick: int) -> Seq | None:
        """Its state has taken all in."""
        seq = self.on_device(pick)
        return None if seq is None or seq.taken < seq.computed else seq

    @rule(tokens=texts, more=texts, again=st.none() | picks, told=st.booleans())
    def reuse(self, tokens: list[int], more: list[int], again: int | None, told: bool) -> None:
        """What a sequence that ended has left is taken up by one that goes on behind it."""
        if len(self.seqs) > 5:
            self.end(self.seqs[0])
        if self.gave_way:
            self.tell()
        if again is not None and self.ended:
            tokens = self.ended[-1 - again % len(self.ended)] + more
        blocks = self.kv.open()
        blocks.borders = frozenset({len(tokens) // self.size * self.size, (len(tokens) - 1) // self.size * self.size})
        hit = self.kv.match_prefix(blocks, tokens, len(tokens) - 1)
        sizes = (self.kv.windows[g] for g in range(self.group + 1))
        need = sum(free * (kind.pages if isinstance(kind, State) else 1) for free, kind in zip(hit.num_free, sizes))
        if need > self.kv.pool.num_free:
            return
        self.kv.adopt(blocks, hit)
        self.done["hit"] += hit.num_tokens > 0
        seq = Seq(blocks, tokens)
        self.seqs.append(seq)
        self.append_to(seq)
        if told:
            self.tell()

    @rule(pick=picks, told=st.booleans(), more=texts)
    def append(self, pick: int, told: bool, more: list[int]) -> None:
        seq = self.on_device(pick)
        if seq is not None:
            if seq.computed == len(seq.tokens):
                seq.tokens = seq.tokens + more[:1]
            self.append_to(seq)
        if told:
            self.tell()

    def append_to(self, seq: Seq) -> None:
        """Or the newest others are preempted."""
        query = seq.tokens[seq.computed : seq.computed + self.rng.randint(1, MAX_QUERY_LEN)]
        seq.drafts = self.rng.choice((0, 0, self.rng.randrange(len(query))))
        while (growth := self.kv.append(seq.blocks, seq.computed + len(query), seq.drafts)) is None:
            others = [each for each in self.seqs if each is not seq and not each.blocks.on_host and each.query is None]
            if not others:
                self.end(seq)
                return
            self.done["preempted"] += 1
            self.end(others[-1])
        seq.query, seq.growth = query, growth
        self.copies += growth.copies
        self.done["copied"] += bool(growth.copies)
        self.kv.register(seq.blocks, seq.tokens[: seq.computed + len(query) - seq.drafts])
        self.done["append"] += 1

    @rule(pick=picks, full=st.none() | st.integers(0, 9))
    def fork(self, pick: int, full: int | None) -> None:
        seq = self.at_rest(pick)
        if seq is None or len(self.seqs) > 5:
            return
        common = seq.computed if full is None else full * self.size
        if common > seq.computed or not self.kv.can_fork(seq.blocks, common):
            return
        blocks = self.kv.fork(seq.blocks, None if full is None else common)
        self.seqs.append(Seq(blocks, seq.tokens[:common] if full is not None else seq.tokens.copy()))
        self.done["fork"] += 1
        if not self.seqs[-1].tokens:
            self.end(self.seqs[-1])

    @rule(pick=picks, other=picks)
    def take_over(self, pick: int, other: int) -> None:
        """As beams do, which have as many tokens; it goes on at once."""
        self.tell()
        seq, source = self.at_rest(pick), self.at_rest(other)
        if seq is None or source is None or seq is source or seq.computed != source.computed:
            return
        growth = take_over(self.kv, seq.blocks, source.blocks)
        self.copies += growth.copies
        self.done["take over"] += 1
        seq.tokens, seq.computed = [*source.tokens[: source.computed], 1], source.computed
        seq.taken = source.taken
        self.append_to(seq)
        self.tell()

    @precondition(lambda self: self.seqs)
    @rule(pick=picks)
    def free(self, pick: int) -> None:
        self.end(self.seqs[pick % len(self.seqs)])

    def end(self, seq: Seq) -> None:
        """Between plans, or preempted before the plan is told."""
        if seq.query is not None:
            self.tell()
        self.gave_way = True
        self.ended.append(seq.tokens[: seq.computed])
        self.kv.free(seq.blocks)
        self.seqs.remove(seq)

    @rule(pick=picks)
    def swap_out(self, pick: int) -> None:
        self.tell()
        seq = self.on_device(pick)
        if seq is not None and self.kv.host is not None and seq.computed:
            if swap_out(self.kv, self.kv.host, [Leaving(seq.blocks, seq.taken)]):
                self.done["swap out"] += 1
                seq.computed, seq.blocks.unsure = seq.taken, 0
            self.tell()

    @rule(pick=picks)
    def swap_in(self, pick: int) -> None:
        if self.gave_way:
            self.tell()
        there = [seq for seq in self.seqs if seq.blocks.on_host]
        if there and self.kv.host is not None:
            seq = there[pick % len(there)]
            if blocks_to_swap_in(self.kv, self.kv.host, [seq.blocks]) <= self.kv.pool.num_free:
                swap_in(self.kv, self.kv.host, [seq.blocks])
                self.done["swap in"] += 1

    @rule()
    def reset(self) -> None:
        if self.rng.random() < 0.1:
            self.kv.reset_prefix_cache()

    # -- invariants --------------------------------------------------------------------------------------------------

    @invariant()
    def what_is_held_is_counted(self) -> None:
        for on_host, pool in ((False, self.kv.pool), (True, self.kv.host and self.kv.host.pool)):
            if pool is None:
                continue
            held = Counter(
                block
                for seq in self.seqs
                if seq.blocks.on_host is on_host
                for table, start in zip(seq.blocks.tables, seq.blocks.starts, strict=True)
                for block in table[start:]
                if block != NO_BLOCK
            )
            if not on_host:
                assert all(pool.ref_counts[block] == held[block] for block in range(pool.num_blocks))
            used = [block for first in held for block in pool.blocks_of(first)]
            assert len(used) == len(set(used)), "two bundles share a block"
            free = [block for first in pool.free_blocks() for block in pool.blocks_of(first)]
            assert len(free) == len(set(free)) == pool.num_free
            assert on_host or set(free) == set(range(pool.num_blocks)) - set(used)

    @invariant()
    def a_sequence_holds_no_more_than_it_may(self) -> None:
        for seq in self.seqs:
            blocks = seq.blocks
            held = sum(
                (self.kv.pool if not blocks.on_host or self.kv.host is None else self.kv.host.pool).size_of(block)
                for table, start in zip(blocks.tables, blocks.starts, strict=True)
                for block in table[start:]
                if block != NO_BLOCK
            )
            drafted = seq.computed - seq.taken + seq.drafts
            more = pages_of(self.kv.windows[self.group]) * -(-drafted // self.size)
            assert held <= self.kv.blocks_for(max(blocks.num_tokens, 1)) + more

    def teardown(self) -> None:
        if hasattr(self, "kv"):
            self.tell()
            for seq in self.seqs:
                self.kv.free(seq.blocks)
            assert self.kv.pool.num_free == self.kv.pool.num_blocks


WANTED = ("append", "copied", "fork", "hit", "preempted", "right", "swap in", "swap out", "take over")
FEW = settings(max_examples=60, stateful_step_count=60)


@pytest.mark.timeout(900)
def test_states_are_what_their_tokens_made(pytestconfig: pytest.Config) -> None:
    done = Counter[str]()
    wanted = 100_000 if pytestconfig.getoption("exhaustive") else 2_000
    while done["append"] < wanted:
        run_state_machine_as_test(seed(done.total())(lambda: States(done)), settings=FEW)
    assert all(map(done.get, WANTED)), f"not every case was met: {sorted(done.items())}"
