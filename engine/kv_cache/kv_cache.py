"""Block tables of sequences: match a prefix, append, fork, free. Everything that shares KV is written in these words.

Torch-free and deterministic: the host decides which block holds what, the device only follows. No operation costs more
than the blocks it adds or drops, so a step never pays for the length of a context.

A sequence has a table for each layer group. A group with a window keeps only the blocks that a later query sees: those
before `starts` were given back, and what their entries name means nothing any more.
"""

from __future__ import annotations

from collections.abc import Sequence as Tokens

import msgspec

from engine.errors import ConfigError, EngineError
from engine.kv_cache.block_pool import NO_BLOCK, BlockPool
from engine.kv_cache.events import KVEventLog
from engine.kv_cache.hash_chain import HashChain, key_of
from engine.kv_cache.host_tier import HostTier, Transfers
from engine.kv_cache.prefix import PrefixHit, count_leading, find_prefix, host_block, is_on_host
from engine.kv_cache.sequence_blocks import NO_GROWTH, Growth, SequenceBlocks
from engine.kv_cache.states import States
from engine.layer_groups import State, Window, first_kept, kept_until, most_blocks, pages_of


class KVCacheStats(msgspec.Struct, frozen=True, kw_only=True):
    """Blocks are gauges, tokens are counters."""

    total: int
    used: int
    free: int
    cached: int
    """findable blocks, used or free"""
    cached_free: int
    query_tokens: int
    hit_tokens: int


class KVCache:
    """``num_blocks`` blocks of ``block_size`` tokens, drawn by layer groups from one pool."""

    def __init__(
        self,
        num_blocks: int,
        block_size: int,
        enable_prefix_caching: bool,
        windows: Tokens[Window] = (None,),
        max_query_len: int | None = None,
        num_host_blocks: int = 0,
        keeps_events: bool = False,
    ) -> None:
        """`windows`: of each layer group; None: it keeps every token. `max_query_len`: tokens that one `append` adds
        at most; None: any number. `num_host_blocks`: of the host tier; 0: there is none. `keeps_events`: somebody takes
        the `events`."""
        if min(num_blocks, block_size, len(windows)) < 1:
            raise ConfigError(
                f"a KV cache needs at least one block, token and group, got num_blocks={num_blocks}, "
                f"block_size={block_size}, windows={tuple(windows)}"
            )
        self.events = KVEventLog(block_size, num_host_blocks > 0) if keeps_events else None
        self.host = HostTier(num_host_blocks, num_blocks, self.events) if num_host_blocks > 0 else None
        keep = self.host.keep if self.host is not None else None
        lost = self.events.lost_on_device if self.events is not None else None
        self.pool = BlockPool(num_blocks, enable_prefix_caching, keep, lost)
        self.block_size = block_size
        self.windows = tuple(windows)
        self.slides = any(window is not None for window in windows)
        """some group keeps only a window"""
        self._whole_group = self.windows.index(None) if None in self.windows else None
        self._sizes = [pages_of(window) for window in windows]
        self.states = States(self.pool, self.events, windows, block_size)
        self._max_query_len = max_query_len
        self._query_tokens = 0
        self._hit_tokens = 0

    @property
    def num_groups(self) -> int:
        return len(self.windows)

    def blocks_for(self, num_tokens: int, forks: int = 0) -> int:
        """Blocks that one sequence holds at most, over all layer groups, until ``num_tokens`` tokens are computed, and
        others are forked from it at as many places."""
        return sum(self._most(num_tokens, window, forks) for window in self.windows)

    def blocks_kept(self, num_tokens: int) -> int:
        """Blocks that ``num_tokens`` computed tokens hold, over all layer groups, once windows have moved on."""
        count = -(-num_tokens // self.block_size)
        held = zip(self._starts(num_tokens), self._sizes, strict=True)
        return sum((count - start) * size for start, size in held)

    def blocks_beyond(self, start: int, num_tokens: int, forks: int = 0) -> int:
        """Of `blocks_for`, those that it takes beside the full blocks of its first ``start`` tokens, which it
        shares."""
        full = start // self.block_size
        new = -(-num_tokens // self.block_size) - full
        sizes = zip(self.windows, self._sizes, strict=True)
        return sum(min(new * size, self._most(num_tokens, window, forks)) for window, size in sizes)

    def blocks_to_start(self, hit: PrefixHit, num_tokens: int, forks: int = 0) -> int:
        """What a sequence takes from the pool to adopt ``hit`` and compute ``num_tokens`` tokens, if others are forked
        from it at as many places."""
        new = -(-num_tokens // self.block_size) - hit.num_tokens // self.block_size
        return sum(
            min((new + free) * size, self._most(num_tokens, window, forks))
            for window, size, free in zip(self.windows, self._sizes, hit.num_free, strict=True)
        )

    def blocks_to_grow(self, blocks: SequenceBlocks, num_tokens: int) -> int:
        """What the sequence may still take from the pool until ``num_tokens`` tokens are computed."""
        new = max(-(-num_tokens // self.block_size) - blocks.num_blocks, 0)
        held = [blocks.num_blocks - start for start in blocks.starts]
        for group, _ in self.states.groups:
            held[group] -= blocks.tables[group][blocks.starts[group] :].count(NO_BLOCK)
        most = [self._most(num_tokens, window, blocks.forks) for window in self.windows]
        sizes = zip(most, held, self._sizes, strict=True)
        return sum(min(new * size, max(limit - have * size, 0)) for limit, have, size in sizes)

    def _most(self, num_tokens: int, window: Window, forks: int) -> int:
        return most_blocks(num_tokens, window, self.block_size, self._max_query_len, forks)

    def open(self, salt: str | None = None, adapter: str | None = None) -> SequenceBlocks:
        """An empty sequence. Blocks are shared only among sequences of equal ``salt`` and ``adapter``."""
        return SequenceBlocks(self.num_groups, HashChain(self.block_size, salt, adapter))

    def match_prefix(self, blocks: SequenceBlocks, tokens: Tokens[int], limit: int) -> PrefixHit:
        """The longest run of cached blocks that holds the head of ``tokens``, at most ``limit`` tokens of it.

        Pass ``limit = len(tokens) - 1`` at most: the last token must be computed, for there is no logit in the cache.
        Takes nothing; O(blocks found).
        """
        return find_prefix((self.pool, self.host), self.windows, self.block_size, blocks.chain, tokens, limit)

    def cached_blocks(self, blocks: SequenceBlocks, tokens: Tokens[int], begin: int, end: int) -> int:
        """A look ahead of `match_prefix`: of the blocks from ``begin`` to ``end``, the leading ones that are cached in
        the first group that keeps all tokens; 0 where there is none. O(blocks found), and hashes the others once."""
        if self._whole_group is None or not self.pool.enable_prefix_caching:
            return 0
        tiers, chain, group = (self.pool, self.host), blocks.chain, self._whole_group
        return count_leading(tiers, chain, tokens, group, begin, end)

    def adopt(self, blocks: SequenceBlocks, hit: PrefixHit) -> None:
        """Start an empty sequence with the blocks of ``hit``."""
        for table, found, start in zip(blocks.tables, hit.tables, hit.starts, strict=True):
            for block in found[start:]:
                if not is_on_host(block):
                    self.pool.acquire(block)
            table.extend(found)
        if self.host is not None:
            self._load(self.host, blocks)
        blocks.starts = hit.starts.copy()
        blocks.num_tokens = hit.num_tokens
        blocks.num_registered = blocks.states_registered = hit.num_tokens // self.block_size
        blocks.settled = hit.num_tokens
        if not blocks.counted:
            blocks.counted = True
            self._query_tokens += hit.query_tokens
            self._hit_tokens += hit.num_tokens

    def _load(self, host: HostTier, blocks: SequenceBlocks) -> None:
        """Blocks that only the host tier has, into new ones of the device. All are held before one is allocated, for
        that may evict to the tier."""
        entries = [(t, i, host_block(b)) for t in blocks.tables for i, b in enumerate(t) if is_on_host(b)]
        for _, _, block in entries:
            host.pool.acquire(block)
        for table, index, block in entries:
            table[index] = self.states.take_as(host.pool, block)
            host.load(block, self.pool.blocks_of(table[index]))
            self.find_as(table[index], host.pool.key_of(block))
            host.pool.release(block)

    def find_as(self, block: int, key: bytes | None) -> None:
        """The device's block holds, or will, what the host tier has under this key."""
        if key is not None and self.pool.register(block, key) and self.events is not None:
            self.events.moved(key, to_host=False)

    def append(self, blocks: SequenceBlocks, upto_tokens: int, drafts: int = 0) -> Growth | None:
        """Make room for the tokens up to ``upto_tokens``, the last of which are ``drafts``; None, and nothing taken,
        when the pool has not enough.

        Blocks that none of these tokens sees, nor any later one, are given back. A partly filled last block that others
        hold too is replaced by a copy first.
        """
        if upto_tokens <= blocks.quiet_until:
            blocks.num_tokens = max(blocks.num_tokens, upto_tokens)
            return NO_GROWTH
        pool, tables = self.pool, blocks.tables
        size, have = self.block_size, len(tables[0])
        if self.slides:
            self.give_back_passed(blocks)
        new_entries = max(-(-upto_tokens // size) - have, 0)
        copied: Tokens[list[int]] = ()
        if upto_tokens > blocks.num_tokens and blocks.num_tokens % size:
            copied = self._shared_ends(blocks)
        certain = upto_tokens - drafts
        kept = {g: self.states.kept(blocks, state, have, new_entries, certain) for g, state in self.states.groups}
        need = new_entries * (len(tables) - len(kept)) + sum(pool.size_of(table[-1]) for table in copied)
        need += sum(self._sizes[group] * sum(entries) for group, entries in kept.items())
        if need > pool.num_free:
            return None
        blocks.settled = blocks.num_tokens - blocks.unsure
        blocks.num_tokens = max(blocks.num_tokens, upto_tokens)
        copies: list[tuple[int, int]] = []
        for table in copied:
            source, table[-1] = table[-1], self.states.take_as(pool, table[-1])
            copies.extend(zip(pool.blocks_of(source), pool.blocks_of(table[-1]), strict=True))
            pool.release(source)
        for group, table in enumerate(tables):
            if group in kept:
                table.extend(self.states.take_bundle(self._sizes[group]) if each else NO_BLOCK for each in kept[group])
            else:
                table.extend(self.states.take_block() for _ in range(new_entries))
        blocks.quiet_until = self._quiet_until(blocks) if self.slides else (have + new_entries) * size
        if kept and new_entries:
            blocks.quiet_until = blocks.num_tokens  # for the next append registers them
        start = have - 1 if copies else have
        if start == have + new_entries:
            return NO_GROWTH
        return Growth(start, [table[start:] for table in tables], copies)

    def _shared_ends(self, blocks: SequenceBlocks) -> Tokens[list[int]]:
        """Tables whose last, partly filled block is not the sequence's alone."""
        counts = self.pool.ref_counts
        return [table for table in blocks.tables if counts[table[-1]] > 1]

    def _quiet_until(self, blocks: SequenceBlocks) -> int:
        """Until its last block is full, or a window leaves a block behind."""
        windows = zip(self.windows, blocks.starts, strict=True)
        slides = [kept_until((start + 1) * self.block_size, window) for window, start in windows if window is not None]
        return min(len(blocks.tables[0]) * self.block_size, *slides)

    def give_back_passed(self, blocks: SequenceBlocks) -> None:
        """What windows went past. Right while steps in flight read it: whoever gets a block writes later."""
        starts = self._starts(blocks.num_tokens - blocks.unsure)
        for group, _ in self.states.groups:  # what a step has made is still to be registered
            starts[group] = max(min(starts[group], blocks.states_registered), blocks.starts[group])
        for table, old, new in zip(blocks.tables, blocks.starts, starts, strict=True):
            for block in table[old:new]:
                self.pool.release(block)
        blocks.starts = starts

    def _starts(self, num_tokens: int) -> list[int]:
        """The first entry of each table that the query at position ``num_tokens`` sees."""
        return [first_kept(num_tokens, window) // self.block_size for window in self.windows]

    def can_fork(self, source: SequenceBlocks, num_tokens: int) -> bool:
        """Whether the source still has what the token after its first ``num_tokens`` sees: no window went past it."""
        count = -(-num_tokens // self.block_size)
        starts = self._starts(num_tokens)
        if count and any(source.tables[group][count - 1] == NO_BLOCK for group, _ in self.states.groups):
            return False
        return all(have <= need or need == count for have, need in zip(source.starts, starts, strict=True))

    def fork(self, source: SequenceBlocks, num_tokens: int | None = None) -> SequenceBlocks:
        """A second sequence with the same tokens so far; it shares every block, also the partly filled last one.

        The same are the tokens that have KV, or the first ``num_tokens`` of them, a multiple of the block size; what
        comes after may differ. Raises `EngineError` where `can_fork` says no.
        """
        common = source.num_tokens if num_tokens is None else num_tokens
        if not self.can_fork(source, common):
            raise EngineError(f"a sequence of {source.num_tokens} tokens cannot be forked at {common}: out of window")
        full, count = common // self.block_size, -(-common // self.block_size)
        fork = SequenceBlocks(self.num_groups, source.chain.fork(full))
        fork.starts = self._starts(common)
        for table, blocks, start in zip(fork.tables, source.tables, fork.starts, strict=True):
            self.pool.acquire_all(blocks[start:count])
            table.extend(blocks[:count])
        source.quiet_until = 0  # its last block may be shared now
        fork.num_tokens = common
        fork.num_registered = min(source.num_registered, full)
        fork.states_registered = min(source.states_registered, full)
        fork.settled, fork.borders = min(source.settled, common), source.borders
        fork.counted = True
        return fork

    def register(self, blocks: SequenceBlocks, tokens: Tokens[int]) -> None:
        """Make the blocks findable that are full and whose tokens are known: up to min(num_tokens, len(tokens)).

        May be called as soon as the step that fills them is planned: in every layer a step writes its KV before it
        reads, and later steps come later on the device, so whoever finds the block reads it filled. A state is read
        before one is written: those that the latest planned step makes are registered by the next call.
        """
        if self.states.groups:
            self.states.register(blocks, tokens)
        pool, first, full = self.pool, blocks.num_registered, min(blocks.num_tokens, len(tokens)) // self.block_size
        if not pool.enable_prefix_caching or full <= first or blocks.on_host:
            return
        blocks.num_registered = full
        digests = blocks.chain.digests_of(full, tokens)
        for group, (table, start) in enumerate(zip(blocks.tables, blocks.starts)):
            if isinstance(self.windows[group], State):
                continue
            indexes = range(max(first, start), full)
            new = [index for index in indexes if pool.register(table[index], key_of(digests[index], group))]
            if new and self.events is not None:
                self.events.stored(blocks.chain, group, new, tokens)

    def landed(self, blocks: SequenceBlocks, tokens: Tokens[int], pages: dict[bytes, int]) -> None:
        """Blocks of the host tier, by what they are found by from now on, hold parts of the sequence's tokens;
        before or after `free`."""
        assert self.host is not None
        new = {key for key, block in pages.items() if self.host.pool.register(block, key)}
        if not new or self.events is None:
            return
        for group in range(self.num_groups):
            names = enumerate(blocks.chain.digests)
            indexes = [index for index, digest in names if key_of(digest, group) in new]
            self.events.stored(blocks.chain, group, indexes, tokens, on_host=True)

    def trim(self, blocks: SequenceBlocks, num_tokens: int) -> None:
        """KV beyond as many tokens was that of wrong drafts: blocks that hold nothing else are given back."""
        count = -(-num_tokens // self.block_size)
        for table in blocks.tables:
            for block in reversed(table[count:]):
                self.pool.release(block)
            del table[count:]
        blocks.num_tokens, blocks.quiet_until = num_tokens, min(blocks.quiet_until, count * self.block_size)

    def free(self, blocks: SequenceBlocks) -> None:
        """Give every block back, tails first, so that the head of a prefix outlives its branches. Idempotent.

        Also right while a step in flight still writes to them: whoever gets them writes in a later step.
        """
        pool = self.host.pool if blocks.on_host and self.host is not None else self.pool
        for index in range(blocks.num_blocks - 1, -1, -1):
            for table, start in zip(blocks.tables, blocks.starts, strict=True):
                if index >= start:
                    pool.release(table[index])
        for table in blocks.tables:
            table.clear()
        blocks.starts = [0] * self.num_groups
        blocks.on_host = False
        blocks.num_tokens = blocks.num_registered = blocks.quiet_until = blocks.unsure = 0
        blocks.settled = blocks.states_registered = 0
        blocks.passing = None

    def forget(self, blocks: SequenceBlocks, first: int) -> None:
        """Nothing that this sequence computed, its blocks from entry `first` on, is found again: that KV is not to be
        trusted; before or after `free`."""
        for digest in blocks.chain.digests[first:]:
            for group in range(self.num_groups):
                self.pool.forget(key_of(digest, group))
                if self.host is not None:
                    self.host.pool.forget(key_of(digest, group))

    def take_transfers(self) -> tuple[Transfers, Transfers]:
        """(to the host tier, from it) since the last call: they belong to the plan that is told now."""
        return self.host.take_transfers() if self.host is not None else ([], [])

    def reset_prefix_cache(self) -> int:
        """Forget every cached block that no sequence uses; returns their number."""
        forgotten = self.pool.forget_free() + (self.host.pool.forget_free() if self.host is not None else 0)
        if self.events is not None and not self.pool.num_cached and not (self.host and self.host.pool.num_cached):
            self.events.cleared()
        return forgotten

    def finds(self, key: bytes) -> bool:
        """In either tier."""
        return self.pool.find(key) is not None or (self.host is not None and self.host.find(key) is not None)

    def stats(self) -> KVCacheStats:
        return KVCacheStats(
            total=self.pool.num_blocks,
            used=self.pool.num_used,
            free=self.pool.num_free,
            cached=self.pool.num_cached,
            cached_free=self.pool.num_cached_free,
            query_tokens=self._query_tokens,
            hit_tokens=self._hit_tokens,
        )
