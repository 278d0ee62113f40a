"""Random histories of what a KV cache does against a model of plain lists and dicts, with a host tier or without."""

from __future__ import annotations

from collections import Counter

import pytest
from cache_model import GONE, WINDOWS, CacheModel, Seq, Window, held, newest, state
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
from msgspec.structs import replace

from engine.kv_cache.kv_cache import KVCache
from engine.kv_cache.prefix import is_on_host
from engine.kv_cache.swapping import Leaving, blocks_to_swap_in, swap_in, swap_out
from engine.kv_cache.take_over import take_over

MAX_QUERY_LEN = 7
MAX_SEQS = 7

picks = st.sampled_from([0, 0, 0, 1, 1, 2, 3, 4, 5, 6])  # which sequence, from the newest
groups = st.lists(picks, min_size=1, max_size=3, unique=True)
often = st.sampled_from([True, True, True, False])
texts = st.integers(1, 9).map(lambda length: [0] * length) | st.lists(st.integers(0, 1), min_size=1, max_size=9)
tails = st.lists(st.integers(0, 1), min_size=1, max_size=2) | texts.map(lambda text: text[:MAX_QUERY_LEN])


class KVCacheMachine(RuleBasedStateMachine):
    def __init__(self, done: Counter[str], keeps_events: bool = False) -> None:
        """`done` counts what happened, over all histories."""
        super().__init__()
        self.done, self.keeps_events = done, keeps_events

    @initialize(
        num_blocks=st.integers(1, 14) | st.integers(6, 14),
        block_size=st.sampled_from([1, 2, 2, 3, 3]),
        caching=st.sampled_from([True, True, True, True, False]),
        windows=st.sampled_from([[None], [None]]) | st.lists(WINDOWS, min_size=1, max_size=3),
        num_host_blocks=st.sampled_from([0, 2, 5, 9, 14, 20, 20]),
    )
    def start(
        self, num_blocks: int, block_size: int, caching: bool, windows: list[Window], num_host_blocks: int
    ) -> None:
        self.kv = KVCache(num_blocks, block_size, caching, windows, MAX_QUERY_LEN, num_host_blocks, self.keeps_events)
        self.model = CacheModel(self.kv)
        self.groups, self.size, self.total = len(windows), block_size, num_blocks
        self.ended: list[tuple[str | None, list[int]]] = []

    @property
    def seqs(self) -> list[Seq]:
        return self.model.seqs

    @property
    def swapped(self) -> list[Seq]:
        return [seq for seq in self.seqs if seq.on_host]

    def any_on_device(self, pick: int) -> Seq:
        """A new one if there is none; it has tokens if there is room."""
        there = [seq for seq in self.seqs if not seq.on_host]
        if there:
            return newest(there, pick)
        seq = Seq(self.kv.open(), None, tables=[[] for _ in range(self.groups)])
        self.seqs.append(seq)
        self.append_to(seq, [0] * 5, known=True)
        return seq

    # -- rules -------------------------------------------------------------------------------------------------------

    @rule(
        salt=st.sampled_from([None, None, "", "s"]),
        tokens=texts,
        spare=st.integers(1, 3),
        again=st.none() | picks,
        start=often,
    )
    def reuse(self, salt: str | None, tokens: list[int], spare: int, again: int | None, start: bool) -> None:
        """Open a sequence whose tokens are known and take what the prefix index has of it. `again`: the tokens of one
        that has ended."""
        model = self.model
        if len(self.seqs) == MAX_SEQS:
            self.end(self.seqs[0])
        if again is not None and self.ended:
            salt, tokens = self.ended[-1 - again % len(self.ended)]
        model.admit()
        seq = Seq(self.kv.open(salt), salt, tokens)
        hit = self.kv.match_prefix(seq.blocks, tokens, len(tokens) - spare)
        count, found = model.longest_prefix(seq, len(tokens) - spare)
        seq.tables = [[GONE] * (count - len(part)) + part for part in found]
        assert hit.num_tokens == count * self.size
        assert [held(*pair) for pair in zip(hit.tables, hit.starts, strict=True)] == seq.tables
        assert hit.num_free == [sum(is_on_host(block) or block in model.free for block in part) for part in found]
        if sum(hit.num_free) > len(model.free):
            return
        seq.tokens, seq.known, seq.registered = tokens[: hit.num_tokens], tokens[hit.num_tokens :], count
        self.kv.adopt(seq.blocks, hit)
        self.done["block found on the host"] += model.adopt(seq)
        self.done["reuse"] += 1
        if start:
            self.append_to(seq, seq.known[:MAX_QUERY_LEN], known=True)

    @rule(
        rows=st.lists(st.tuples(picks, tails, st.booleans()), min_size=1, max_size=4),
        preempt=st.sampled_from(["no", "free", "swap"]),
    )
    def append(self, rows: list[tuple[int, list[int], bool]], preempt: str) -> None:
        """To several sequences; where there is no room, the newest ones may be preempted."""
        self.done["append"] += 1
        for pick, tokens, known in rows:
            fits = self.append_to(self.any_on_device(pick), tokens, known)
            if not fits and preempt == "free":
                self.preempt(self.any_on_device(0))
            elif not fits and preempt == "swap":
                self.swap(list(dict.fromkeys([self.any_on_device(0), self.any_on_device(1)])))

    def append_to(self, seq: Seq, tokens: list[int], known: bool) -> bool:
        """Whether there was room."""
        model = self.model
        if seq.tentative or seq.in_plan:
            model.tell()
        tokens = seq.known[: len(tokens)] or tokens
        model.slide(seq)
        model.evicted.clear()
        upto = len(seq.tokens) + len(tokens)
        new = -(-upto // self.size) - len(seq.tables[0])
        partly_filled = len(seq.tokens) % self.size != 0
        shared = [table for table in seq.tables if partly_filled and model.holders(table[-1]) > 1]
        growth = self.kv.append(seq.blocks, upto)
        if new * self.groups + len(shared) > len(model.free):
            assert growth is None
            return False
        assert growth is not None
        copies = []
        for table in shared:
            source, table[-1] = table[-1], model.take()
            copies.append((source, table[-1]))
        for table in seq.tables:
            table.extend(model.take() for _ in range(new))
        assert growth.copies == copies
        if growth.block_ids:
            assert growth.block_ids == [table[growth.start :] for table in seq.tables]
            assert [len(ids) for ids in growth.block_ids] == [new + bool(shared)] * self.groups
        seq.tentative, seq.growth, seq.offered = tokens, growth, known
        model.tentative.append(seq)
        if model.placed:
            model.place()
        self.evicted_prefixes_are_kept_on_the_host()
        return True

    def evicted_prefixes_are_kept_on_the_host(self) -> None:
        """As many of the last ones as there is room beside what is held."""
        if self.kv.host is not None and (kept := self.model.evicted[-self.kv.host.pool.num_free :]):
            assert self.kv.host.pool.num_free == 0 or set(kept) <= self.model.host_index().keys()
            self.done["evicted to the host"] += 1

    @rule(pick=picks, whole=often, full=st.integers(0, 14), then=st.sampled_from(["", "append", "append", "swap"]))
    def fork(self, pick: int, whole: bool, full: int, then: str) -> None:
        """Of all tokens, or of the first few blocks. It goes on, or is to and is preempted, or nothing of the kind."""
        model = self.model
        if len(self.seqs) >= MAX_SEQS:
            self.end(self.seqs[0])
        seq = self.any_on_device(pick)
        if seq.tentative:
            model.place()
        have = len(seq.tokens) // self.size
        full = have if whole else min(full, have)
        tokens = seq.tokens.copy() if whole else seq.tokens[: full * self.size]
        tables = [table.copy() if whole else table[:full] for table in seq.tables]
        self.done["fork"] += 1
        if not whole:
            needed = [model.needed(full * self.size, group) for group in range(self.groups)]
            possible = all(table[i] != GONE for table, part in zip(seq.tables, needed, strict=True) for i in part)
            assert self.kv.can_fork(seq.blocks, full * self.size) == possible
            if not possible:
                return
        for group, table in enumerate(tables):
            part = model.needed(len(tokens), group)
            table[:] = [block if i in part else GONE for i, block in enumerate(table)]
        blocks = self.kv.fork(seq.blocks, None if whole else full * self.size)
        fork = Seq(blocks, seq.salt, tokens, tables=tables, registered=min(seq.registered, full))
        fork.in_plan = whole and seq.in_plan
        self.seqs.append(fork)
        if then:
            self.append_to(fork, [1], known=False)
        if then == "swap":
            self.swap([fork, seq] if full % 2 else [fork])

    @rule(pick=picks, other=picks, split=often, then=st.sampled_from(["append", "append", "append", "swap", "free"]))
    def take_over(self, pick: int, other: int, split: bool, then: str) -> None:
        """A beam goes on with another one's history, or with that leaves for the host, or ends."""
        if split:  # two beams that differ in their last token
            self.fork(pick := 0, whole=True, full=0, then="append")
            self.append([(other := 1, [0], False)], preempt="no")
        self.model.between_plans()
        source = self.any_on_device(other)
        seqs = [seq for seq in self.seqs if seq.salt == source.salt and seq is not source and not seq.on_host]
        if not seqs:
            return
        seq = newest(seqs, pick)
        alike = seq.blocks.starts == source.blocks.starts
        seq.growth = take_over(self.kv, seq.blocks, source.blocks)
        copies = self.model.take_over(seq, source, alike)
        self.done["take over"] += 1
        self.done["last block kept"] += bool(copies)
        assert seq.growth.copies == copies
        assert all(ids == table[seq.growth.start :] for ids, table in zip(seq.growth.block_ids, seq.blocks.tables))
        if then == "swap":
            self.swap([seq, source])
        if not seq.on_host and (then != "append" or not self.append_to(seq, [1], known=False)):
            self.end(seq)
        elif not seq.on_host:
            seq.growth = replace(seq.growth, copies=[*copies, *seq.growth.copies])

    @rule(pick=picks, tokens=tails, wrong=st.integers(0, MAX_QUERY_LEN), swaps=st.booleans())
    def trim(self, pick: int, tokens: list[int], wrong: int, swaps: bool) -> None:
        """The last ones of what was computed were drafts, and wrong; then the sequence may leave for the host."""
        self.model.between_plans()
        seq = self.any_on_device(pick)
        self.model.between_plans()
        before = len(seq.tokens)
        fits = not seq.known and self.append_to(seq, tokens, known=False)  # drafts are behind what is known
        self.model.between_plans()
        self.kv.trim(seq.blocks, count := max(len(seq.tokens) - wrong, before))
        self.done["trim"] += self.model.trim(seq, count)
        if fits and swaps:
            self.model.between_plans()
            self.swap([seq])

    @precondition(lambda self: self.seqs)
    @rule(pick=picks, preempt=st.booleans(), twice=st.booleans())
    def free(self, pick: int, preempt: bool, twice: bool) -> None:
        """A sequence ends or, preempted to be computed again, gives back what the plan was to compute, too."""
        seq = newest(self.seqs, pick)
        self.done["free"] += 1
        if preempt and not seq.on_host:
            self.preempt(seq)
        else:
            self.end(seq, twice)

    def preempt(self, seq: Seq) -> None:
        self.model.decide()
        self.model.take_back(seq)
        self.drop(seq)

    def end(self, seq: Seq, twice: bool = False) -> None:
        self.model.between_plans()
        self.done["free on the host"] += seq.on_host
        self.drop(seq, twice)

    def drop(self, seq: Seq, twice: bool = False) -> None:
        if seq.tokens:
            self.ended.append((seq.salt, seq.tokens))
        self.kv.free(seq.blocks)
        if twice:
            self.kv.free(seq.blocks)
        self.model.drop(seq)

    @precondition(lambda self: self.kv.host is not None)
    @rule(chosen=groups)
    def swap_out(self, chosen: list[int]) -> None:
        self.done["swap"] += 1
        self.swap(list(dict.fromkeys(self.any_on_device(pick) for pick in chosen)))

    def swap(self, group: list[Seq]) -> None:
        """All of a group or nothing; what was appended for the plan is taken back."""
        model, kv, host = self.model, self.kv, self.kv.host
        if host is None:
            return
        model.decide()
        leaving = [Leaving(seq.blocks, len(seq.tokens), seq.growth.copies) for seq in group]
        old = [[table[: -(-len(seq.tokens) // self.size)] for table in seq.tables] for seq in group]
        blocks = {block for tables in old for table in tables for block in table if block != GONE}
        need = model.missing_on_host(blocks)
        num_free = host.pool.num_free
        before = state(kv.pool), state(host.pool), [seq.blocks.num_tokens for seq in group]
        done = swap_out(kv, host, leaving)
        assert done == (need <= num_free and host.pool.num_blocks - num_free + need <= self.total)
        self.done["swap out" if done else "swap out refused"] += 1
        if not done:
            assert before == (state(kv.pool), state(host.pool), [seq.blocks.num_tokens for seq in group])
            return
        self.done["swapped append with a copy"] += any(seq.growth.copies for seq in group)
        self.done["swapped group that shares"] += len(blocks) < sum(len(t) - t.count(GONE) for o in old for t in o)
        moved: dict[int, int] = {}
        for seq, tables in zip(group, old, strict=True):
            model.take_back(seq)
            model.leave_device(seq)
            for table, copies in zip(tables, seq.tables, strict=True):
                for block, copy in zip(table, copies, strict=True):
                    assert moved.setdefault(block, copy) == copy, "what was shared is not any more"
        assert len(set(moved.values())) == len(moved), "what was not shared is now"

    @precondition(lambda self: self.swapped)
    @rule(chosen=groups)
    def swap_in(self, chosen: list[int]) -> None:
        model, kv, host, swapped = self.model, self.kv, self.kv.host, self.swapped
        assert host is not None
        model.admit()
        group = list(dict.fromkeys(newest(swapped, pick) for pick in chosen))
        found = model.found_on_device(group)
        need = sum(block is None or block in model.free for block in found.values())
        assert blocks_to_swap_in(kv, host, [seq.blocks for seq in group]) == need
        if need > len(model.free):
            return
        swap_in(kv, host, [seq.blocks for seq in group])
        self.done["swap in"] += 1
        self.done["swapped block still on the device"] += sum(block is not None for block in found.values())
        model.enter_device(group, found)

    @rule(then=st.sampled_from([*[""] * 14, "reset", "forget"]), pick=picks)
    def tell(self, then: str, pick: int) -> None:
        self.model.tell()
        self.done["tell"] += 1
        if then == "reset":
            self.reset()
        elif then == "forget" and self.seqs:
            self.forget(newest(self.seqs, pick))

    def reset(self) -> None:
        """Nothing is found that no sequence uses."""
        host, forgotten = self.kv.host, self.model.reset()
        assert self.kv.reset_prefix_cache() == forgotten
        assert host is None or all(host.pool.ref_counts[block] for block in self.model.host_index().values())

    def forget(self, seq: Seq) -> None:
        """Of a faulted sequence nothing is found again, though others keep their blocks."""
        model = self.model
        model.register(seq)
        self.kv.forget(seq.blocks, 0)
        forgotten = model.forget(seq, len(seq.blocks.chain.digests))
        assert forgotten.isdisjoint(model.host_index())
        complete = len(seq.blocks.chain.digests) >= seq.registered or not model.caching or None not in model.windows
        assert complete, "all that it wrote is forgotten"

    # -- invariants --------------------------------------------------------------------------------------------------

    @invariant()
    def reference_counts_equal_table_entries(self) -> None:
        """And, of the host tier, what a planned transfer reads."""
        assert [[held(*pair) for pair in zip(seq.blocks.tables, seq.blocks.starts)] for seq in self.seqs] == [
            seq.tables for seq in self.seqs
        ]
        tiers = [(False, self.kv.pool)] + ([(True, self.kv.host.pool)] if self.kv.host is not None else [])
        for on_host, pool in tiers:
            tables = [table for seq in self.seqs if seq.on_host is on_host for table in seq.tables]
            entries = Counter(block for table in tables for block in table if block != GONE)
            if on_host:
                assert len(entries) <= self.total, "more is held than the device has"
                entries += Counter(source for source, _ in self.model.loads)
            assert pool.ref_counts == [entries[block] for block in range(pool.num_blocks)]
            free = list(pool.free_blocks())
            assert len(free) == len(set(free)) == pool.num_free == pool.num_blocks - pool.num_used
            assert set(free) == set(range(pool.num_blocks)) - entries.keys()

    @invariant()
    def blocks_are_handed_out_least_recently_used_first_and_tails_before_heads(self) -> None:
        pool, stats = self.kv.pool, self.kv.stats()
        assert stats.free + stats.used == stats.total == self.total and stats.cached == len(self.model.index)
        assert list(pool.free_blocks()) == self.model.free
        assert stats.cached_free == sum(pool.key_of(block) is not None for block in self.model.free)

    @invariant()
    def waste_is_less_than_one_block_per_sequence(self) -> None:
        for seq in self.seqs:
            upto = len(seq.tokens) + len(seq.tentative)
            assert seq.blocks.num_tokens == upto
            assert all(0 <= len(table) * self.size - upto < self.size for table in seq.blocks.tables)
            assert sum(block != GONE for table in seq.tables for block in table) <= self.kv.blocks_for(upto)

    def teardown(self) -> None:
        if not hasattr(self, "kv"):
            return
        self.model.tell()
        for seq in self.seqs:
            self.kv.free(seq.blocks)
        assert self.kv.pool.ref_counts == [0] * self.total, "after all sequences end every block is free"
        assert self.kv.stats().free == self.total
        if self.kv.host is not None:
            assert self.kv.host.pool.num_used == 0, "after all sequences end every block of the host is free"


FEW = settings(max_examples=50, stateful_step_count=150)
RULES = ("append", "fork", "free", "reuse", "swap", "swap in", "take over", "tell")
RARE = ("block found on the host", "last block kept", "swapped append with a copy", "swapped group that shares")


@pytest.mark.timeout(900)
def test_no_block_leaks_in_thousands_of_steps(pytestconfig: pytest.Config) -> None:
    done = Counter[str]()
    wanted = 100_000 if pytestconfig.getoption("exhaustive") else 8_000
    while sum(done[name] for name in RULES) < wanted:
        run_state_machine_as_test(seed(done.total())(lambda: KVCacheMachine(done)), settings=FEW)
    assert all(map(done.get, RARE)), f"not every rare case was met: {sorted(done.items())}"
