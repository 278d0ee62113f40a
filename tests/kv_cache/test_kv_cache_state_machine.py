"""Random histories of open, match, append, fork, free, forget and reset against a model of plain lists and dicts."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from engine.kv_cache.kv_cache import KVCache, SequenceBlocks

GONE = -1

Name = tuple[int, str | None, tuple[int, ...]]
"""what a block holds: layer group, salt, every token up to its end"""


@dataclass
class Seq:
    blocks: SequenceBlocks
    salt: str | None
    tokens: list[int] = field(default_factory=list)
    """those that have KV"""
    known: list[int] = field(default_factory=list)
    """those that follow, as far as they are decided"""
    tables: list[list[int]] = field(default_factory=list)
    """GONE where a window went past"""
    registered: int = 0
    """blocks that were offered to the index; each is offered once"""


MAX_QUERY_LEN = 7


def held(table: list[int], start: int) -> list[int]:
    return [GONE] * min(start, len(table)) + table[start:]


class KVCacheMachine(RuleBasedStateMachine):
    """The model: the free list as a list in hand-out order, the index as a dict by name, slot contents by block."""

    @initialize(
        num_blocks=st.integers(1, 14),
        block_size=st.integers(1, 3),
        caching=st.booleans() | st.just(True),
        windows=st.sampled_from([[None], [None]]) | st.lists(st.none() | st.integers(1, 5), min_size=1, max_size=3),
    )
    def start(self, num_blocks: int, block_size: int, caching: bool, windows: list[int | None]) -> None:
        self.kv = KVCache(num_blocks, block_size, caching, windows, MAX_QUERY_LEN)
        self.windows, self.groups = windows, len(windows)
        self.size, self.caching, self.total = block_size, caching, num_blocks
        self.seqs: list[Seq] = []
        self.free = list(range(num_blocks))
        self.index: dict[Name, int] = {}
        self.slots: dict[tuple[int, int], tuple[int, ...]] = {}

    # -- the model ---------------------------------------------------------------------------------------------------

    def holders(self, block: int) -> int:
        return sum(table.count(block) for seq in self.seqs for table in seq.tables)

    def cached(self, block: int) -> bool:
        return block in self.index.values()

    def take(self) -> int:
        block = self.free.pop(0)
        self.index = {name: held for name, held in self.index.items() if held != block}
        return block

    def give_back(self, block: int) -> None:
        if block != GONE and self.holders(block) == 0:
            self.free.insert(len(self.free) if self.cached(block) else 0, block)

    def needed(self, num_tokens: int, group: int) -> range:
        """Table entries that the query at position `num_tokens` sees, as far as there are any before it is appended."""
        window = self.windows[group]
        seen = [p for p in range(num_tokens + 1) if window is None or p > num_tokens - window]
        return range(seen[0] // self.size, -(-num_tokens // self.size))

    def slide(self, seq: Seq) -> None:
        """Give back what no query sees any more."""
        for group, table in enumerate(seq.tables):
            needed = self.needed(len(seq.tokens), group)
            for index in range(len(table)):
                if self.windows[group] is not None and index not in needed:
                    block, table[index] = table[index], GONE
                    self.give_back(block)

    def name(self, seq: Seq, group: int, index: int) -> Name:
        return group, seq.salt, tuple(seq.tokens[: (index + 1) * self.size])

    # -- rules -------------------------------------------------------------------------------------------------------

    @rule(
        salt=st.sampled_from([None, None, "", "s"]),
        tokens=st.lists(st.integers(0, 1), min_size=1, max_size=9),
        spare=st.integers(1, 3),
    )
    def reuse(self, salt: str | None, tokens: list[int], spare: int) -> None:
        """Open a sequence whose tokens are known and take what the prefix index has of it."""
        seq = Seq(self.kv.open(salt), salt, tables=[[] for _ in range(self.groups)])
        limit = len(tokens) - spare
        hit = self.kv.match_prefix(seq.blocks, tokens, limit)
        seq.tokens = tokens
        for count in range(max(limit, 0) // self.size if self.caching else 0, -1, -1):
            needed = [self.needed(count * self.size, group) for group in range(self.groups)]
            if all(self.name(seq, group, i) in self.index for group, part in enumerate(needed) for i in part):
                break
        expected = [
            [self.index[self.name(seq, group, i)] if i in part else GONE for i in range(count)]
            for group, part in enumerate(needed)
        ]
        assert hit.num_tokens == count * self.size <= max(limit, 0)
        assert [held(*pair) for pair in zip(hit.tables, hit.starts, strict=True)] == expected
        assert hit.num_free == [sum(block in self.free for block in table) for table in expected]
        self.kv.adopt(seq.blocks, hit)
        self.free = [block for block in self.free if not any(block in table for table in expected)]
        seq.tokens, seq.known, seq.tables = tokens[: hit.num_tokens], tokens[hit.num_tokens :], expected
        seq.registered = len(expected[0])
        self.seqs.append(seq)

    @precondition(lambda self: self.seqs)
    @rule(data=st.data(), tokens=st.lists(st.integers(0, 1), min_size=1, max_size=7), known=st.booleans())
    def append(self, data: st.DataObject, tokens: list[int], known: bool) -> None:
        seq = data.draw(st.sampled_from(self.seqs))
        tokens = seq.known[: len(tokens)] or tokens
        self.slide(seq)
        upto = len(seq.tokens) + len(tokens)
        new = -(-upto // self.size) - len(seq.tables[0])
        partly_filled = len(seq.tokens) % self.size != 0
        shared = [table for table in seq.tables if partly_filled and self.holders(table[-1]) > 1]
        growth = self.kv.append(seq.blocks, upto)
        if new * self.groups + len(shared) > len(self.free):
            assert growth is None
            return
        assert growth is not None
        copies = []
        for table in shared:
            source, table[-1] = table[-1], self.take()
            copies.append((source, table[-1]))
            for offset in range(len(seq.tokens) % self.size):
                self.slots[table[-1], offset] = self.slots[source, offset]
        for table in seq.tables:
            table.extend(self.take() for _ in range(new))
        assert growth.copies == copies
        if growth.block_ids:
            assert growth.block_ids == [table[growth.start :] for table in seq.tables]
            assert [len(ids) for ids in growth.block_ids] == [new + bool(shared)] * self.groups
        self.write(seq, tokens)
        seq.known = seq.known[len(tokens) :]
        if known:
            self.register(seq)

    def write(self, seq: Seq, tokens: list[int]) -> None:
        for token in tokens:
            index, offset = divmod(len(seq.tokens), self.size)
            seq.tokens.append(token)
            for table in seq.tables:
                assert self.holders(table[index]) == 1, "a write to a shared block"
                assert not self.cached(table[index]), "a write to a block that can be found"
                self.slots[table[index], offset] = tuple(seq.tokens)

    def register(self, seq: Seq) -> None:
        self.kv.register(seq.blocks, seq.tokens + seq.known)
        if self.caching:
            for index in range(seq.registered, len(seq.tokens) // self.size):
                for group, table in enumerate(seq.tables):
                    if table[index] != GONE and not self.cached(table[index]):
                        self.index.setdefault(self.name(seq, group, index), table[index])
            seq.registered = len(seq.tokens) // self.size

    @precondition(lambda self: self.seqs and len(self.seqs) < 6)
    @rule(data=st.data(), whole=st.booleans())
    def fork(self, data: st.DataObject, whole: bool) -> None:
        """Of all tokens, or of the first few blocks."""
        seq = data.draw(st.sampled_from(self.seqs))
        full = len(seq.tokens) // self.size if whole else data.draw(st.integers(0, len(seq.tokens) // self.size))
        tokens = seq.tokens.copy() if whole else seq.tokens[: full * self.size]
        tables = [table.copy() if whole else table[:full] for table in seq.tables]
        if not whole:
            needed = [self.needed(full * self.size, group) for group in range(self.groups)]
            possible = all(table[i] != GONE for table, part in zip(seq.tables, needed, strict=True) for i in part)
            assert self.kv.can_fork(seq.blocks, full * self.size) == possible
            if not possible:
                return
        for group, table in enumerate(tables):
            part = self.needed(len(tokens), group)
            table[:] = [block if i in part else GONE for i, block in enumerate(table)]
        blocks = self.kv.fork(seq.blocks, None if whole else full * self.size)
        self.seqs.append(Seq(blocks, seq.salt, tokens, tables=tables, registered=min(seq.registered, full)))

    @precondition(lambda self: self.seqs)
    @rule(data=st.data(), twice=st.booleans())
    def release(self, data: st.DataObject, twice: bool) -> None:
        seq = self.seqs.pop(data.draw(st.integers(0, len(self.seqs) - 1)))
        self.kv.free(seq.blocks)
        if twice:
            self.kv.free(seq.blocks)
        tables, seq.tables = seq.tables, []
        for index in reversed(range(len(tables[0]))):
            for table in tables:
                self.give_back(table[index])

    @rule()
    def reset(self) -> None:
        kept = {name: block for name, block in self.index.items() if block not in self.free}
        assert self.kv.reset_prefix_cache() == len(self.index) - len(kept)
        self.index = kept

    @precondition(lambda self: self.seqs)
    @rule(data=st.data())
    def forget(self, data: st.DataObject) -> None:
        """Of a faulted sequence nothing is found again, though others keep their blocks."""
        seq = data.draw(st.sampled_from(self.seqs))
        self.register(seq)
        self.kv.forget(seq.blocks)
        seq.tokens, own = seq.tokens + seq.known, len(seq.tokens)
        for index in range(len(seq.blocks.chain.digests)):
            for group in range(self.groups):
                block = self.index.pop(self.name(seq, group, index), None)
                if block in self.free:
                    self.free.remove(block)
                    self.free.insert(0, block)
        complete = len(seq.blocks.chain.digests) >= own // self.size or not self.caching or None not in self.windows
        assert complete, "all that it wrote is forgotten"
        del seq.tokens[own:]

    # -- invariants --------------------------------------------------------------------------------------------------

    @invariant()
    def reference_counts_equal_table_entries(self) -> None:
        tables = [[held(*pair) for pair in zip(seq.blocks.tables, seq.blocks.starts, strict=True)] for seq in self.seqs]
        entries = Counter(block for seq in tables for table in seq for block in table if block != GONE)
        assert self.kv.pool.ref_counts == [entries[block] for block in range(self.total)]
        assert tables == [seq.tables for seq in self.seqs]

    @invariant()
    def free_and_used_are_all(self) -> None:
        pool, stats = self.kv.pool, self.kv.stats()
        assert stats.free + stats.used == stats.total == self.total
        assert stats.cached == len(self.index)
        assert set(pool.free_blocks()) == {block for block in range(self.total) if pool.ref_counts[block] == 0}

    @invariant()
    def blocks_are_handed_out_least_recently_used_first_and_tails_before_heads(self) -> None:
        assert list(self.kv.pool.free_blocks()) == self.free

    @invariant()
    def waste_is_less_than_one_block_per_sequence(self) -> None:
        for seq in self.seqs:
            assert seq.blocks.num_tokens == len(seq.tokens)
            assert all(0 <= len(table) * self.size - len(seq.tokens) < self.size for table in seq.blocks.tables)
            assert sum(block != GONE for table in seq.tables for block in table) <= self.kv.blocks_for(len(seq.tokens))

    @invariant()
    def every_sequence_reads_its_own_tokens(self) -> None:
        for seq in self.seqs:
            for group, table in enumerate(seq.tables):
                window = self.windows[group]
                for position in range(0 if window is None else max(0, len(seq.tokens) - window + 1), len(seq.tokens)):
                    index, offset = divmod(position, self.size)
                    assert self.slots[table[index], offset] == tuple(seq.tokens[: position + 1])

    def teardown(self) -> None:
        if hasattr(self, "kv"):
            for seq in self.seqs:
                self.kv.free(seq.blocks)
            assert self.kv.stats().free == self.total, "after all sequences end every block is free"


TestKVCacheHistories = KVCacheMachine.TestCase
TestKVCacheHistories.settings = settings(
    max_examples=400, stateful_step_count=40, deadline=None, suppress_health_check=[HealthCheck.too_slow]
)
TestKVCacheHistories = pytest.mark.timeout(120)(TestKVCacheHistories)
