"""States of recurrent layers among the blocks: bundles of pages, which a sequence has where its table says, and where
the prefix cache finds them."""

from __future__ import annotations

from collections.abc import Iterable
from collections.abc import Sequence as Tokens

from engine.kv_cache.block_pool import NO_BLOCK, BlockPool
from engine.kv_cache.events import KVEventLog
from engine.kv_cache.hash_chain import key_of
from engine.kv_cache.sequence_blocks import SequenceBlocks
from engine.layer_groups import State, Window


class States:
    """Part of a `KVCache`: who takes from its pool does so here, because a page that held a state is to be cleaned
    before it holds keys and values."""

    def __init__(self, pool: BlockPool, events: KVEventLog | None, windows: Tokens[Window], block_size: int) -> None:
        self.groups = [(group, each) for group, each in enumerate(windows) if isinstance(each, State)]
        """those that keep states, by their number"""
        self._pool, self._events, self._block_size = pool, events, block_size
        self._bundles: list[list[int]] = []
        self._uncleaned: set[int] = set()
        self._for_copies: set[int] = set()
        """blocks that held a state before and that a copy is to be made into, unless who wanted it is preempted"""

    def wanted(self, blocks: SequenceBlocks, prompt_len: int, forks: Iterable[int]) -> None:
        """Where a sequence that starts is to keep its state on its way: behind the last whole block of its prompt, for
        prompts that go on from there, and behind as many tokens as `forks` says, multiples of the block size."""
        if self.groups:
            blocks.borders = self.prompt_borders(prompt_len).union(forks)

    def prompt_borders(self, prompt_len: int) -> frozenset[int]:
        size = self._block_size
        return frozenset({prompt_len // size * size, (prompt_len - 1) // size * size})

    def kept(self, blocks: SequenceBlocks, state: State, have: int, new_entries: int, certain: int) -> list[bool]:
        """Of the next entries, which hold a state: those in which the sequence may end, with drafts behind as many
        `certain` tokens, and those at whose end one is wanted."""
        size = self._block_size
        ends = range((have + 1) * size, (have + new_entries + 1) * size, size)
        return [end >= certain or end in blocks.borders or end % state.every == 0 for end in ends]

    def take_as(self, pool: BlockPool, first: int) -> int:
        """A free block, or a bundle where that one of either tier's pool is one, held once, for a copy of that one."""
        if pool.is_bundle(first):
            return self.take_bundle(pool.size_of(first))
        block = self._pool.allocate()
        if block in self._pool.unclean or block in self._uncleaned:
            self._pool.unclean.discard(block)
            self._uncleaned.discard(block)
            self._for_copies.add(block)
        return block

    def take_block(self) -> int:
        pool = self._pool
        block = pool.allocate()
        if block in pool.unclean:
            pool.unclean.discard(block)
            self._uncleaned.add(block)
        return block

    def take_bundle(self, size: int) -> int:
        first = self._pool.allocate_bundle(size)
        self._bundles.append(self._pool.blocks_of(first))
        self._uncleaned.difference_update(self._bundles[-1])
        self._for_copies.difference_update(self._bundles[-1])
        return first

    def told(self, copied: Iterable[tuple[int, int]]) -> tuple[list[list[int]], list[int]]:
        """Since the last call: the blocks of each bundle that was taken, and the blocks taken for keys and values that
        held a state before. They belong to the plan that is told now; `copied` is what it writes: (source, there)."""
        if not self.groups:
            return [], []
        for block in self._for_copies.difference(there for _, there in copied):
            (self._uncleaned if self._pool.ref_counts[block] else self._pool.unclean).add(block)
        bundles, uncleaned = self._bundles, self._uncleaned
        self._bundles, self._uncleaned, self._for_copies = [], set(), set()
        return bundles, sorted(uncleaned)

    def settle(self, blocks: SequenceBlocks) -> None:
        """No step that is being planned computes anything of it."""
        blocks.settled = blocks.num_tokens - blocks.unsure

    def register(self, blocks: SequenceBlocks, tokens: Tokens[int]) -> None:
        """Those at the ends of blocks. One that is to stay found stays; else it is found until a later one is."""
        full = min(blocks.settled, len(tokens)) // self._block_size
        first, blocks.states_registered = blocks.states_registered, max(full, blocks.states_registered)
        if not self._pool.enable_prefix_caching or full <= first or blocks.on_host:
            return
        digests = blocks.chain.digests_of(full, tokens)
        for group, state in self.groups:
            table = blocks.tables[group]
            for index in range(max(first, blocks.starts[group]), full):
                key, end = key_of(digests[index], group), (index + 1) * self._block_size
                if table[index] == NO_BLOCK or not self._pool.register(table[index], key):
                    continue
                if self._events is not None:
                    self._events.stored(blocks.chain, group, [index], tokens)
                if blocks.passing is not None:
                    self._pool.forget(blocks.passing)
                blocks.passing = None if end in blocks.borders or end % state.every == 0 else key
