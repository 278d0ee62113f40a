"""The longest cached prefix that every layer group has: a group without a window needs all of its blocks, one with a
window those that the next token sees."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from engine.kv_cache.block_pool import BlockPool
from engine.kv_cache.hash_chain import HashChain, key_of
from engine.kv_cache.host_tier import HostTier
from engine.layer_groups import Window, first_kept

_NOTHING = 0
"""stands in tables where no block is held"""

Tiers = tuple[BlockPool, HostTier | None]


class PrefixHit(msgspec.Struct, frozen=True, kw_only=True):
    """Cached blocks that hold the head of a sequence. Valid until the next call that allocates or resets."""

    num_tokens: int
    query_tokens: int
    """tokens that were looked up; 0 where the cache was not to be used"""
    tables: list[list[int]]
    """of each layer group; `is_on_host` tells which entries only the host tier has"""
    starts: list[int]
    """the first entry of each table that is needed"""
    num_free: list[int]
    """how many of a group's blocks are free now, or on the host: adopting them takes as many from the pool"""


def find_prefix(
    tiers: Tiers,
    windows: Sequence[Window],
    block_size: int,
    chain: HashChain,
    tokens: Sequence[int],
    limit: int,
) -> PrefixHit:
    """At most ``limit`` tokens of the head of ``tokens``. Takes nothing; O(blocks looked up)."""
    pool, _ = tiers
    count = 0
    tables: list[list[int]] = [[] for _ in windows]
    if pool.enable_prefix_caching:
        count = max(limit, 0) // block_size
        for group, window in enumerate(windows):
            if window is None:
                tables[group] = _leading(tiers, chain, tokens, group, count)
                count = len(tables[group])
        count = _shrink_to_windows(tiers, windows, block_size, chain, tokens, count)
    num_tokens = count * block_size
    starts = [first_kept(num_tokens, window) // block_size for window in windows]
    num_free = []
    for group, (window, start) in enumerate(zip(windows, starts, strict=True)):
        if window is None:
            table = tables[group][:count]
        else:
            found = (_find(tiers, key_of(chain.digest(i, tokens), group)) for i in range(start, count))
            table = [_NOTHING] * start + [block for block in found if block is not None]
        tables[group] = table
        num_free.append(sum(is_on_host(block) or pool.ref_counts[block] == 0 for block in table[start:]))
    return PrefixHit(
        num_tokens=num_tokens,
        query_tokens=len(tokens) if limit > 0 else 0,
        tables=tables,
        starts=starts,
        num_free=num_free,
    )


def _find(tiers: Tiers, key: bytes) -> int | None:
    pool, host = tiers
    block = pool.find(key)
    if block is None and host is not None and (there := host.find(key)) is not None:
        return ~there
    return block


def is_on_host(block: int) -> bool:
    """Of an entry of `PrefixHit.tables`."""
    return block < 0


def host_block(block: int) -> int:
    """The host tier's block that such an entry stands for."""
    return ~block


def _leading(tiers: Tiers, chain: HashChain, tokens: Sequence[int], group: int, count: int) -> list[int]:
    """Blocks 0, 1, … of a group, as far as they are cached, at most ``count``."""
    table: list[int] = []
    for index in range(count):
        block = _find(tiers, key_of(chain.digest(index, tokens), group))
        if block is None:
            break
        table.append(block)
    return table


def count_leading(tiers: Tiers, chain: HashChain, tokens: Sequence[int], group: int, begin: int, end: int) -> int:
    """Of the blocks from ``begin`` to ``end`` of a group, the leading ones that are cached."""
    for index in range(begin, end):
        if _find(tiers, key_of(chain.digest(index, tokens), group)) is None:
            return index - begin
    return max(end - begin, 0)


def _shrink_to_windows(
    tiers: Tiers,
    windows: Sequence[Window],
    block_size: int,
    chain: HashChain,
    tokens: Sequence[int],
    count: int,
) -> int:
    """The largest number of blocks, at most ``count``, before which every group with a window has what it needs."""
    sliding = [(group, window) for group, window in enumerate(windows) if window is not None]
    settled = turn = 0
    while sliding and settled < len(sliding) and count > 0:  # until all of them in a row are content with `count`
        group, window = sliding[turn % len(sliding)]
        turn += 1
        index = count - 1
        end = count
        while index >= first_kept(end * block_size, window) // block_size:
            if _find(tiers, key_of(chain.digest(index, tokens), group)) is None:
                end = index
            index -= 1
        settled = settled + 1 if end == count else 1
        count = end
    return count
