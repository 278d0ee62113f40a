"""The pool of fixed-size KV blocks: reference counts, the free list and the prefix index, each operation O(1).

What is larger than a block, a state of recurrent layers, is a *bundle*: several blocks of which the first stands for
all. It has one reference count and one key; while it is cached, only its first block is in the free list.

The free list is doubly linked through two arrays (no objects, no search), in eviction order: blocks that hold nothing
are at the front, then cached blocks from the least to the most recently released. A cached block leaves the index only
when it is handed out again, so everything that is free can still be found until its memory is needed.

Source of the idea: Kwon et al., "Efficient Memory Management for Large Language Model Serving with PagedAttention", §4.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator

from engine.errors import EngineError

NO_BLOCK = -1
"""stands in tables where nothing is held"""


class BlockPool:
    """Blocks 0 .. num_blocks-1. A block is *used* while its reference count is positive, else *free*; a block of
    either kind may be *cached*: findable by the key (chained hash) of what it holds."""

    def __init__(
        self,
        num_blocks: int,
        enable_prefix_caching: bool,
        on_evict: Callable[[bytes, list[int], bool], None] | None = None,
        on_lost: Callable[[bytes], None] | None = None,
    ) -> None:
        """`on_evict` gets the key and the blocks of what is forgotten because its memory is needed, and whether they
        are a bundle; `on_lost` gets the
        key of whatever is forgotten, behind `on_evict`."""
        self.num_blocks = num_blocks
        self._on_evict, self._on_lost = on_evict, on_lost
        self.enable_prefix_caching = enable_prefix_caching
        self.num_free = num_blocks
        self.num_cached_free = 0
        """of the free blocks, those that are still found"""
        self.ref_counts = [0] * num_blocks
        self._rest: dict[int, list[int]] = {}
        """the first block of a bundle → its other blocks"""
        self.unclean: set[int] = set()
        """blocks that were last part of a bundle: what they hold is no keys and values, and may be NaN if taken for
        such"""
        self._key_of: list[bytes | None] = [None] * num_blocks
        self._block_of: dict[bytes, int] = {}
        # Entry num_blocks is the sentinel that closes the ring.
        self._next: list[int] = [*range(1, num_blocks + 1), 0]
        self._prev: list[int] = [num_blocks, *range(num_blocks)]

    @property
    def num_used(self) -> int:
        return self.num_blocks - self.num_free

    @property
    def num_cached(self) -> int:
        return len(self._block_of)

    def allocate(self) -> int:
        """Take the block that was of no use for the longest time; what was cached in it is forgotten.

        Raises `EngineError` when none is free: callers compare with `num_free` first.
        """
        sentinel = self.num_blocks
        block = self._next[sentinel]
        if block == sentinel:
            raise EngineError(f"all {sentinel} KV blocks are in use")
        after = self._next[block]
        self._next[sentinel], self._prev[after] = after, sentinel
        self.num_free -= 1
        if self._key_of[block] is not None:
            self.num_cached_free -= self.size_of(block)
            self._evict(block)
            self._part(block, is_free=True)
        self.ref_counts[block] = 1
        return block

    def allocate_bundle(self, size: int) -> int:
        """Take as many blocks, of which the first stands for all; as `allocate`."""
        if size > self.num_free:
            raise EngineError(f"a bundle of {size} KV blocks is wanted, {self.num_free} are free")
        first, *rest = [self.allocate() for _ in range(size)]
        self.unclean.update((first, *rest))
        self._rest[first] = rest
        for block in rest:
            self.ref_counts[block] = 0
        return first

    def blocks_of(self, first: int) -> list[int]:
        """All of a bundle, or the one block."""
        return [first, *self._rest.get(first, ())]

    def is_bundle(self, first: int) -> bool:
        return first in self._rest

    def size_of(self, first: int) -> int:
        """How many blocks it stands for."""
        return 1 + len(self._rest.get(first, ()))

    def _part(self, first: int, *, is_free: bool = False) -> None:
        """A bundle is none any more: its other blocks hold nothing. `is_free`: they count as free already."""
        rest = self._rest.pop(first, None)
        if rest is not None:
            self.num_free -= len(rest) * is_free
            for block in reversed(rest):
                self._link(block, at_front=True)

    def _evict(self, block: int) -> None:
        """What is cached in it is forgotten, for its memory is needed."""
        key = self._key_of[block]
        if key is not None:
            del self._block_of[key]
            self._key_of[block] = None
            if self._on_evict is not None:
                self._on_evict(key, self.blocks_of(block), block in self._rest)
            if self._on_lost is not None:
                self._on_lost(key)

    def acquire(self, block: int) -> None:
        """One more owner; a free (cached) block becomes used again."""
        if block == NO_BLOCK:
            return
        if self.ref_counts[block] == 0:
            self._unlink(block)
            if self._key_of[block] is not None:
                self.num_cached_free -= self.size_of(block)
        self.ref_counts[block] += 1

    def acquire_all(self, blocks: list[int]) -> None:
        """One more owner of each; somebody holds them all."""
        counts = self.ref_counts
        for block in blocks:
            if block != NO_BLOCK:
                counts[block] += 1

    def release_all(self, blocks: Iterable[int]) -> None:
        """`release` of each, in this order."""
        counts = self.ref_counts
        for block in blocks:
            if counts[block] > 1 and block != NO_BLOCK:
                counts[block] -= 1
            else:
                self.release(block)

    def release(self, block: int) -> None:
        """One owner less. The last one makes it free: last to be evicted if cached, first to be handed out if not."""
        if block == NO_BLOCK:
            return
        count = self.ref_counts[block] - 1
        if count < 0:
            raise EngineError(f"KV block {block} was released more often than acquired")
        self.ref_counts[block] = count
        if count == 0:
            cached = self._key_of[block] is not None
            if cached:
                self.num_cached_free += self.size_of(block)
            elif self._rest:
                self._part(block)
            self._link(block, at_front=not cached)

    def find(self, key: bytes) -> int | None:
        return self._block_of.get(key)

    def key_of(self, block: int) -> bytes | None:
        """What the block is found by; None: it is not."""
        return self._key_of[block]

    def register(self, block: int, key: bytes) -> bool:
        """Make a full block findable. Where another block holds the same already, that one stays the one that is
        found, and False is returned."""
        if self.enable_prefix_caching and key not in self._block_of and self._key_of[block] is None:
            self._block_of[key] = block
            self._key_of[block] = key
            return True
        return False

    def forget(self, key: bytes) -> None:
        """The block of this key, if any, is not found any more; its owners keep it."""
        block = self._block_of.pop(key, None)
        if block is None:
            return
        self._key_of[block] = None
        if self.ref_counts[block] == 0:
            self.num_cached_free -= self.size_of(block)
            self._unlink(block)
            self._part(block)
            self._link(block, at_front=True)
        if self._on_lost is not None:
            self._on_lost(key)

    def forget_free(self) -> int:
        """Forget every cached block that nobody uses; returns how many there were. O(free blocks)."""
        forgotten = 0
        for block in self.free_blocks():
            key = self._key_of[block]
            if key is not None:
                del self._block_of[key]
                self._key_of[block] = None
                forgotten += 1
                if self._on_lost is not None:
                    self._on_lost(key)
        self.num_cached_free = 0
        for first in [block for block in self._rest if not self.ref_counts[block]]:
            self._part(first, is_free=True)
        return forgotten

    def free_blocks(self) -> Iterator[int]:
        """Free blocks in the order in which they will be handed out."""
        block = self._next[self.num_blocks]
        while block != self.num_blocks:
            yield block
            block = self._next[block]

    def _unlink(self, block: int) -> None:
        before, after = self._prev[block], self._next[block]
        self._next[before], self._prev[after] = after, before
        self.num_free -= self.size_of(block)

    def _link(self, block: int, at_front: bool) -> None:
        sentinel = self.num_blocks
        before, after = (sentinel, self._next[sentinel]) if at_front else (self._prev[sentinel], sentinel)
        self._prev[block], self._next[block] = before, after
        self._next[before] = self._prev[after] = block
        self.num_free += self.size_of(block)
