"""Block tables of sequences: match a prefix, append, fork, free. Everything that shares KV is written in these words.

Torch-free and deterministic: the host decides which block holds what, the device only follows. No operation costs more
than the blocks it adds or drops, so a step never pays for the length of a context.
"""

from __future__ import annotations

from collections.abc import Sequence as Tokens

import msgspec

from engine.errors import ConfigError
from engine.kv_cache.block_pool import BlockPool
from engine.kv_cache.hash_chain import HashChain


class SequenceBlocks:
    """What the cache knows of one sequence. Owned by the sequence, changed only by `KVCache`."""

    __slots__ = ("chain", "counted", "num_registered", "num_tokens", "tables")

    def __init__(self, num_groups: int, chain: HashChain) -> None:
        self.tables: list[list[int]] = [[] for _ in range(num_groups)]
        """block table of each layer group; all have the same length"""
        self.num_tokens = 0
        """tokens whose KV is written, or will be by a step that is planned"""
        self.num_registered = 0
        """leading blocks that went through the prefix index already"""
        self.chain = chain
        self.counted = False
        """this sequence's first look-up is in the statistics"""

    @property
    def num_blocks(self) -> int:
        return len(self.tables[0])


class PrefixHit(msgspec.Struct, frozen=True, kw_only=True):
    """Cached blocks that hold the head of a sequence. Valid until the next call that allocates or resets."""

    num_tokens: int
    query_tokens: int
    """tokens that were looked up; 0 where the cache was not to be used"""
    tables: list[list[int]]
    num_free: int
    """how many of the blocks are free now, so that adopting them takes as many from the pool"""


class Growth(msgspec.Struct, frozen=True, kw_only=True):
    """What an append changed: block-table entries from ``start`` on, one list per layer group."""

    start: int
    block_ids: list[list[int]]
    copies: list[tuple[int, int]]
    """(source, destination): copy-on-write, before the step that writes"""


NO_GROWTH = Growth(start=0, block_ids=[], copies=[])


class KVCacheStats(msgspec.Struct, frozen=True, kw_only=True):
    """Blocks are gauges, tokens are counters."""

    total: int
    used: int
    free: int
    cached: int
    """findable blocks, used or free"""
    query_tokens: int
    hit_tokens: int


class KVCache:
    """``num_blocks`` blocks of ``block_size`` tokens, drawn by ``num_groups`` layer groups from one pool."""

    def __init__(self, num_blocks: int, block_size: int, enable_prefix_caching: bool, num_groups: int = 1) -> None:
        if min(num_blocks, block_size, num_groups) < 1:
            raise ConfigError(
                f"a KV cache needs at least one block, token and group, got num_blocks={num_blocks}, "
                f"block_size={block_size}, num_groups={num_groups}"
            )
        self.pool = BlockPool(num_blocks, enable_prefix_caching)
        self.block_size = block_size
        self.num_groups = num_groups
        self._query_tokens = 0
        self._hit_tokens = 0

    def blocks_for(self, num_tokens: int) -> int:
        """Blocks that ``num_tokens`` tokens of one sequence take, over all layer groups."""
        return -(-num_tokens // self.block_size) * self.num_groups

    def open(self, salt: str | None = None) -> SequenceBlocks:
        """An empty sequence. Blocks are shared only among sequences of equal ``salt``."""
        return SequenceBlocks(self.num_groups, HashChain(self.block_size, salt))

    def match_prefix(self, blocks: SequenceBlocks, tokens: Tokens[int], limit: int) -> PrefixHit:
        """The longest run of cached blocks that holds the head of ``tokens``, at most ``limit`` tokens of it.

        Pass ``limit = len(tokens) - 1`` at most: the last token must be computed, for there is no logit in the cache.
        Takes nothing; O(blocks found).
        """
        tables: list[list[int]] = [[] for _ in range(self.num_groups)]
        num_free = matched = 0
        pool = self.pool
        if pool.enable_prefix_caching:
            for index in range(limit // self.block_size):
                digest = blocks.chain.digest(index, tokens)
                found = [pool.find(_key(digest, group)) for group in range(self.num_groups)]
                if None in found:
                    break
                for table, block in zip(tables, found, strict=True):
                    if block is not None:
                        table.append(block)
                        num_free += pool.ref_counts[block] == 0
                matched += 1
        return PrefixHit(
            num_tokens=matched * self.block_size,
            query_tokens=len(tokens) if limit > 0 else 0,
            tables=tables,
            num_free=num_free,
        )

    def adopt(self, blocks: SequenceBlocks, hit: PrefixHit) -> None:
        """Start an empty sequence with the blocks of ``hit``."""
        for table, found in zip(blocks.tables, hit.tables, strict=True):
            for block in found:
                self.pool.acquire(block)
            table.extend(found)
        blocks.num_tokens = hit.num_tokens
        blocks.num_registered = hit.num_tokens // self.block_size
        if not blocks.counted:
            blocks.counted = True
            self._query_tokens += hit.query_tokens
            self._hit_tokens += hit.num_tokens

    def append(self, blocks: SequenceBlocks, upto_tokens: int) -> Growth | None:
        """Make room for the tokens up to ``upto_tokens``; None, and nothing changed, when the pool has not enough.

        A partly filled last block that others hold too is replaced by a copy first.
        """
        pool, tables = self.pool, blocks.tables
        have = len(tables[0])
        new_entries = max(-(-upto_tokens // self.block_size) - have, 0)
        shared: list[list[int]] = []
        if blocks.num_tokens % self.block_size and upto_tokens > blocks.num_tokens:
            shared = [table for table in tables if pool.ref_counts[table[-1]] > 1]
        if not new_entries and not shared:
            blocks.num_tokens = max(blocks.num_tokens, upto_tokens)
            return NO_GROWTH
        if new_entries * self.num_groups + len(shared) > pool.num_free:
            return None
        copies = []
        for table in shared:
            source, table[-1] = table[-1], pool.allocate()
            pool.release(source)
            copies.append((source, table[-1]))
        for table in tables:
            table.extend(pool.allocate() for _ in range(new_entries))
        blocks.num_tokens = upto_tokens
        start = have - 1 if shared else have
        return Growth(start=start, block_ids=[table[start:] for table in tables], copies=copies)

    def fork(self, source: SequenceBlocks, num_tokens: int | None = None) -> SequenceBlocks:
        """A second sequence with the same tokens so far; it shares every block, also the partly filled last one.

        The same are the tokens that have KV, or the first ``num_tokens`` of them, a multiple of the block size; what
        comes after may differ.
        """
        common = source.num_tokens if num_tokens is None else num_tokens
        full, count = common // self.block_size, -(-common // self.block_size)
        fork = SequenceBlocks(self.num_groups, source.chain.fork(full))
        for table, blocks in zip(fork.tables, source.tables, strict=True):
            for block in blocks[:count]:
                self.pool.acquire(block)
            table.extend(blocks[:count])
        fork.num_tokens = common
        fork.num_registered = min(source.num_registered, full)
        fork.counted = True
        return fork

    def register(self, blocks: SequenceBlocks, tokens: Tokens[int]) -> None:
        """Make the blocks findable that are full and whose tokens are known: up to min(num_tokens, len(tokens)).

        May be called as soon as the step that fills them is planned: in every layer a step writes its KV before it
        reads, and later steps come later on the device, so whoever finds the block reads it filled.
        """
        full = min(blocks.num_tokens, len(tokens)) // self.block_size
        if full <= blocks.num_registered or not self.pool.enable_prefix_caching:
            return
        for index in range(blocks.num_registered, full):
            digest = blocks.chain.digest(index, tokens)
            for group, table in enumerate(blocks.tables):
                self.pool.register(table[index], _key(digest, group))
        blocks.num_registered = full

    def free(self, blocks: SequenceBlocks) -> None:
        """Give every block back, tails first, so that the head of a prefix outlives its branches. Idempotent.

        Also right while a step in flight still writes to them: whoever gets them writes in a later step.
        """
        for index in range(blocks.num_blocks - 1, -1, -1):
            for table in blocks.tables:
                self.pool.release(table[index])
        for table in blocks.tables:
            table.clear()
        blocks.num_tokens = blocks.num_registered = 0

    def forget(self, blocks: SequenceBlocks) -> None:
        """Nothing that this sequence computed or used is found again (its KV is not to be trusted); before or after
        `free`."""
        for digest in blocks.chain.digests:
            for group in range(self.num_groups):
                self.pool.forget(_key(digest, group))

    def reset_prefix_cache(self) -> int:
        """Forget every cached block that no sequence uses; returns their number."""
        return self.pool.forget_free()

    def stats(self) -> KVCacheStats:
        return KVCacheStats(
            total=self.pool.num_blocks,
            used=self.pool.num_used,
            free=self.pool.num_free,
            cached=self.pool.num_cached,
            query_tokens=self._query_tokens,
            hit_tokens=self._hit_tokens,
        )


def _key(digest: bytes, group: int) -> bytes:
    return digest if group == 0 else digest + group.to_bytes(2, "little")
