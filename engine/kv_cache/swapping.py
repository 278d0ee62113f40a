"""Sequences to the host tier and back: all blocks of a group of sequences at once, shared ones once."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from engine.kv_cache.block_pool import NO_BLOCK, BlockPool
from engine.kv_cache.host_tier import HostTier
from engine.kv_cache.kv_cache import KVCache
from engine.kv_cache.sequence_blocks import SequenceBlocks
from engine.layer_groups import State


class Leaving(msgspec.Struct, frozen=True):
    """A sequence that is to leave the device."""

    blocks: SequenceBlocks
    num_tokens: int
    """those with KV; what was appended beyond for a step that does not come is dropped"""
    copies: list[tuple[int, int]] = []
    """(source, destination) among its blocks that the device was not told of"""


def swap_out(kv: KVCache, host: HostTier, group: Sequence[Leaving]) -> bool:
    """Whether the tier had room for all of them; else nothing has changed."""
    sources = {destination: source for one in group for source, destination in one.copies}
    entries = [_held_entries(one, kv.block_size) for one in group]
    held = (block for tables in entries for table in tables for block in table if block != NO_BLOCK)
    names = {block: kv.pool.key_of(block) for block in held}
    found = {block: host.find(key) for block, key in names.items() if key is not None}
    new = [block for block in names if found.get(block) is None]
    cached = [block for block in found.values() if block is not None and host.pool.ref_counts[block] == 0]
    if not host.room_for(sum(map(kv.pool.size_of, new)) + sum(map(host.pool.size_of, cached))):
        return False
    at = {block: there for block, there in found.items() if there is not None}
    for there in at.values():
        host.pool.acquire(there)
    for block in new:
        where = [sources.get(each, each) for each in kv.pool.blocks_of(block)]
        at[block] = host.store(where, names[block], kv.pool.is_bundle(block))
    for one, tables in zip(group, entries, strict=True):
        _move(one.blocks, tables, at, kv.pool, host.pool)
        one.blocks.on_host = True
        one.blocks.num_tokens = one.num_tokens
        one.blocks.num_registered = min(one.blocks.num_registered, one.num_tokens // kv.block_size)
        one.blocks.states_registered = min(one.blocks.states_registered, one.num_tokens // kv.block_size)
        one.blocks.settled = min(one.blocks.settled, one.num_tokens)
    for there in at.values():
        host.pool.release(there)
    return True


def blocks_to_swap_in(kv: KVCache, host: HostTier, group: Sequence[SequenceBlocks]) -> int:
    """Blocks that the group takes from the device's pool."""
    found = _on_device(kv, host, group).items()
    return sum(host.pool.size_of(block) for block, there in found if there is None or kv.pool.ref_counts[there] == 0)


def blocks_to_go_on(kv: KVCache, host: HostTier, group: Sequence[tuple[SequenceBlocks, int]]) -> int:
    """What sequences whose blocks are on the host take from the pool to be swapped in and computed to so many tokens
    each. Each needs its own for a block that is not full."""
    held = blocks_to_swap_in(kv, host, [blocks for blocks, _ in group])
    filling = {table[-1] for blocks, _ in group if blocks.num_tokens % kv.block_size for table in blocks.tables}
    need = held + sum(kv.blocks_beyond(blocks.num_tokens, known, blocks.forks) for blocks, known in group)
    need -= sum(map(host.pool.size_of, filling))
    return max(held, min(need, sum(kv.blocks_for(known, blocks.forks) for blocks, known in group)))


def lost_with(kv: KVCache, group: Sequence[SequenceBlocks]) -> tuple[int, int]:
    """Tokens that are to be computed again if their blocks are given back, and those blocks: what others hold, too,
    stays."""
    counts: dict[int, int] = {}
    deepest: set[int] = set()
    for blocks in group:
        for table, start, window in zip(blocks.tables, blocks.starts, kv.windows, strict=True):
            for block in table[start:]:
                if block != NO_BLOCK:
                    counts[block] = counts.get(block, 0) + 1
            if start == 0 and not isinstance(window, State):
                deepest.update(table)
    alone = {block for block, count in counts.items() if kv.pool.ref_counts[block] == count}
    deep = zip(group[0].starts, kv.windows, strict=True)
    groups = max(1, sum(start == 0 and not isinstance(window, State) for start, window in deep))
    tokens = len(alone & deepest) * kv.block_size // groups
    lost = max(tokens, max(blocks.num_tokens for blocks in group) if not deepest else 0)
    return lost, sum(map(kv.pool.size_of, alone))


def swap_in(kv: KVCache, host: HostTier, group: Sequence[SequenceBlocks]) -> None:
    """The pool has `blocks_to_swap_in` free blocks. What the device still has is not transferred."""
    found = _on_device(kv, host, group)
    at = {block: there for block, there in found.items() if there is not None}
    for there in at.values():
        kv.pool.acquire(there)
    for block in found:
        if block not in at:
            at[block] = kv.states.take_as(host.pool, block)
            host.load(block, kv.pool.blocks_of(at[block]))
            kv.find_as(at[block], host.pool.key_of(block))
    for blocks in group:
        tables = [table[start:] for table, start in zip(blocks.tables, blocks.starts, strict=True)]
        _move(blocks, tables, at, host.pool, kv.pool)
        blocks.on_host = False
    for there in at.values():
        kv.pool.release(there)


def _on_device(kv: KVCache, host: HostTier, group: Sequence[SequenceBlocks]) -> dict[int, int | None]:
    """Each host block of the group, and the device's block that holds the same, if one does."""
    found: dict[int, int | None] = {}
    for blocks in group:
        for table, start in zip(blocks.tables, blocks.starts, strict=True):
            for block in table[start:]:
                if block not in found and block != NO_BLOCK:
                    key = host.pool.key_of(block)
                    found[block] = None if key is None else kv.pool.find(key)
    return found


def _held_entries(one: Leaving, block_size: int) -> list[list[int]]:
    """Of each table, what holds KV."""
    count = -(-one.num_tokens // block_size)
    return [table[start:count] for table, start in zip(one.blocks.tables, one.blocks.starts, strict=True)]


def _move(
    blocks: SequenceBlocks, tables: list[list[int]], at: dict[int, int], here: BlockPool, there: BlockPool
) -> None:
    """Let the sequence's tables name, from their starts on, what `at` has for the entries in `tables`; give back the
    old ones."""
    for index, (old, start) in enumerate(zip(blocks.tables, blocks.starts, strict=True)):
        moved = [NO_BLOCK if block == NO_BLOCK else at[block] for block in tables[index]]
        for block in moved:
            there.acquire(block)
        for block in reversed(old[start:]):
            here.release(block)
        blocks.tables[index] = old[:start] + moved
    blocks.quiet_until = 0
