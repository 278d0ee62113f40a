"""What the cache knows of one sequence, and what an append has changed of that."""

from __future__ import annotations

import msgspec

from engine.kv_cache.hash_chain import HashChain


class SequenceBlocks:
    """What the cache knows of one sequence. Owned by the sequence, changed only by `KVCache`."""

    __slots__ = (
        "borders",
        "chain",
        "counted",
        "num_registered",
        "num_tokens",
        "on_host",
        "passing",
        "quiet_until",
        "settled",
        "starts",
        "states_registered",
        "tables",
        "unsure",
    )

    def __init__(self, num_groups: int, chain: HashChain) -> None:
        self.tables: list[list[int]] = [[] for _ in range(num_groups)]
        """block table of each layer group; all have the same length"""
        self.starts = [0] * num_groups
        """the first entry of each table that is held"""
        self.on_host = False
        """the tables name blocks of the host tier"""
        self.num_tokens = 0
        """tokens whose KV is written, or will be by a step that is planned"""
        self.unsure = 0
        """how many of these are drafts that may be wrong, or that no state has taken in yet: windows do not move on for
        them"""
        self.quiet_until = 0
        """up to as many tokens an append changes nothing but `num_tokens`: the last block is its own, and no window has
        moved on by a block"""
        self.num_registered = 0
        """leading blocks that went through the prefix index already"""
        self.borders: frozenset[int] = frozenset()
        """tokens, of whole blocks, behind which a state is kept"""
        self.settled = 0
        """those of the tokens that steps before the one that is planned compute"""
        self.states_registered = 0
        """as `num_registered`, of the groups that keep states: those of a step are found from the next one on, because
        a step reads a state before it writes one"""
        self.passing: bytes | None = None
        """what the last state is found by that makes room for the next one in the prefix cache"""
        self.chain = chain
        self.counted = False
        """this sequence's first look-up is in the statistics"""

    @property
    def num_blocks(self) -> int:
        return len(self.tables[0])

    @property
    def forks(self) -> int:
        """Those of `borders` that are not behind its prompt, or one more."""
        return max(len(self.borders) - 1, 0)


class Growth(msgspec.Struct, frozen=True, gc=False):
    """What an append changed: block-table entries from ``start`` on, one list per layer group."""

    start: int
    block_ids: list[list[int]]
    copies: list[tuple[int, int]]
    """(source, destination): copy-on-write, before the step that writes"""

    def with_more(self, growth: Growth) -> Growth:
        """Both, of which the other came right behind."""
        if self is NO_GROWTH or growth is NO_GROWTH:
            return self if growth is NO_GROWTH else growth
        ids = [one + other for one, other in zip(self.block_ids, growth.block_ids, strict=True)]
        return Growth(self.start, ids, self.copies + growth.copies)


NO_GROWTH = Growth(start=0, block_ids=[], copies=[])
