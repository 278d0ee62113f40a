"""Prompts that were computed for another engine: their whole blocks are held for it until it has read them, their time
is over, or somebody here needs the room.

What is leased ends before the prompt's last token, which the reader has to compute for its logits, and at a block's
end: half a block has no name. As a pin, a lease forks its sequence as soon as all of that is planned.
"""

from __future__ import annotations

import msgspec

from engine.kv_cache.hash_chain import key_of
from engine.kv_cache.kv_cache import KVCache
from engine.kv_cache.sequence_blocks import SequenceBlocks
from engine.kv_transfer.interface import Connector
from engine.kv_transfer.params import KVTransferParams


def leased_tokens(prompt_len: int, block_size: int) -> int:
    return (prompt_len - 1) // block_size * block_size


class _Lease(msgspec.Struct):
    blocks: SequenceBlocks
    num_tokens: int


class Leases:
    """`keep` while the prompt is computed; then `offer`, or `drop` where it does not end well."""

    def __init__(self, kv: KVCache, connector: Connector | None) -> None:
        """Leases together hold at most half of the pool; older ones give way."""
        self._kv, self._connector = kv, connector
        self._kept: dict[str, _Lease] = {}
        """by request: those whose prompt is being computed"""
        self._offered: dict[int, _Lease] = {}
        """by generation, from the oldest on"""
        self._generation = 0
        self.expired = self.gave_way = 0
        """leases since the start that nobody read in time, or before their blocks were needed"""

    def __len__(self) -> int:
        return len(self._offered)

    @property
    def num_blocks(self) -> int:
        """Entries of their tables; what several leases share counts for each."""
        return sum(_held(lease) for lease in self._offered.values())

    def keep(self, request_id: str, blocks: SequenceBlocks, prompt_len: int, computed: int) -> None:
        """To be called whenever the request was placed in a step."""
        tokens = leased_tokens(prompt_len, self._kv.block_size)
        if tokens and request_id not in self._kept and computed >= tokens and self._kv.can_fork(blocks, tokens):
            self._kept[request_id] = _Lease(self._kv.fork(blocks, tokens), tokens)

    def offer(self, request_id: str, prompt: list[int]) -> KVTransferParams | None:
        """The request has ended well, so what it planned is computed. None: there is nothing to be read."""
        lease = self._kept.pop(request_id, None)
        if lease is None:
            return None
        if self._connector is None:
            self._kv.free(lease.blocks)
            return None
        self._generation += 1
        self._offered[self._generation] = lease
        params = self._connector.offer(self._generation, _pages(lease, prompt, self._kv.block_size))
        while len(self) > 1 and (
            len(self) > self._connector.most_leases or self.num_blocks > self._kv.pool.num_blocks // 2
        ):
            self.give_way()
        return params

    def drop(self, request_id: str) -> None:
        """The request ended before it could be offered. Unknown ones are ignored."""
        lease = self._kept.pop(request_id, None)
        if lease is not None:
            self._kv.free(lease.blocks)

    def end(self, generation: int, expired: bool = False) -> None:
        """One that ended already is ignored."""
        lease = self._offered.pop(generation, None)
        if lease is not None:
            self._kv.free(lease.blocks)
            self.expired += expired

    def give_way(self) -> bool:
        """The oldest one ends, for its blocks are needed here; whether there was any. Its reader computes itself."""
        generation = next(iter(self._offered), None)
        if generation is None or self._connector is None:
            return False
        self._connector.withdraw(generation)
        self.end(generation)
        self.gave_way += 1
        return True


def _held(lease: _Lease) -> int:
    return sum(lease.blocks.num_blocks - start for start in lease.blocks.starts)


def _pages(lease: _Lease, prompt: list[int], block_size: int) -> dict[bytes, int]:
    blocks, count = lease.blocks, lease.num_tokens // block_size
    digests = blocks.chain.digests_of(count, prompt)
    return {
        key_of(digests[index], group): table[index]
        for group, (table, start) in enumerate(zip(blocks.tables, blocks.starts, strict=True))
        for index in range(start, count)
    }
