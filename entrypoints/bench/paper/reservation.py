"""The paper's baselines as reservation policies (§6.1): what Orca would have kept for a request, for its whole life.

`ReservingKVCache` has the interface that the scheduler needs of a KV cache, so the same scheduler runs over it: what
differs is memory alone. A request gets one contiguous chunk from a buddy allocator when it starts, and nothing is
shared.
"""

from __future__ import annotations

from collections.abc import Callable
from collections.abc import Sequence as Tokens
from dataclasses import dataclass

from engine.errors import EngineError
from engine.kv_cache.kv_cache import KVCache
from engine.kv_cache.prefix import PrefixHit
from engine.kv_cache.sequence_blocks import NO_GROWTH, Growth, SequenceBlocks
from entrypoints.bench.paper.buddy import BuddyAllocator, chunk_size

Policy = Callable[[int, int, int], int]
"""(prompt tokens, output tokens, longest sequence of the model) → slots to reserve"""


def reserve_max(prompt: int, output: int, longest: int) -> int:
    """Orca (Max): up to the model's longest sequence."""
    return longest


def reserve_pow2(prompt: int, output: int, longest: int) -> int:
    """Orca (Pow2): the output's length is over-reserved to the next power of two (25 → 32)."""
    return min(prompt + (1 << (output - 1).bit_length()), longest)


def reserve_oracle(prompt: int, output: int, longest: int) -> int:
    """Orca (Oracle): the output's length is known."""
    return prompt + output


POLICIES: dict[str, Policy] = {
    "Orca (Max)": reserve_max,
    "Orca (Pow2)": reserve_pow2,
    "Orca (Oracle)": reserve_oracle,
}


@dataclass
class Reserved:
    """Slots held now, by what becomes of them."""

    final: int = 0
    """that will hold a token before their request ends"""
    policy: int = 0
    """that the policy asked for"""


class ReservedBlocks(SequenceBlocks):
    """A sequence's chunk: wanted from the start, held while it runs."""

    __slots__ = ("chunk", "final_slots", "policy_slots")

    def __init__(self, blocks: SequenceBlocks, final_slots: int, policy_slots: int) -> None:
        super().__init__(1, blocks.chain)
        self.final_slots = final_slots
        self.policy_slots = policy_slots
        self.chunk: int | None = None
        """its first block"""


class ReservingKVCache(KVCache):
    """`expect` tells what the next sequence that is opened will reserve; then `Scheduler.add` opens it."""

    def __init__(self, num_blocks: int, block_size: int) -> None:
        super().__init__(num_blocks, block_size, enable_prefix_caching=False)
        self.held = Reserved()
        self._buddy = BuddyAllocator(num_blocks)
        self._expected: tuple[int, int] | None = None

    def expect(self, final_slots: int, policy_slots: int) -> None:
        """Of the next sequence: tokens that it will hold in the end, and what to reserve for it."""
        self._expected = final_slots, max(final_slots, policy_slots)

    def open(self, salt: str | None = None, adapter: str | None = None) -> SequenceBlocks:
        if self._expected is None:
            raise EngineError("a sequence was opened before `expect` told what to reserve for it")
        expected, self._expected = self._expected, None
        return ReservedBlocks(super().open(salt, adapter), *expected)

    def match_prefix(self, blocks: SequenceBlocks, tokens: Tokens[int], limit: int) -> PrefixHit:
        """Nothing is ever found. `num_free` says only whether there is a chunk: less than any room if there is, more
        than any if not."""
        enough = self.pool.num_blocks * 2
        num_free = -enough if self._buddy.fits(self._units(blocks)) else enough
        return PrefixHit(num_tokens=0, query_tokens=0, tables=[[]], starts=[0], num_free=[num_free])

    def blocks_to_start(self, hit: PrefixHit, num_tokens: int, forks: int = 0) -> int:
        return hit.num_free[0]

    def adopt(self, blocks: SequenceBlocks, hit: PrefixHit) -> None:
        """The sequence starts: its chunk is taken."""
        assert isinstance(blocks, ReservedBlocks)
        units = self._units(blocks)
        blocks.chunk = self._buddy.allocate(units)
        if blocks.chunk is None:
            raise EngineError(f"no chunk of {units} blocks is free")
        blocks.tables[0].extend(range(blocks.chunk, blocks.chunk + units))
        self.pool.num_free -= chunk_size(units)
        self._hold(blocks, +1)

    def append(self, blocks: SequenceBlocks, upto_tokens: int, drafts: int = 0) -> Growth | None:
        """All of it is there already."""
        if upto_tokens > blocks.num_blocks * self.block_size:
            raise EngineError(f"{upto_tokens} tokens do not fit a chunk of {blocks.num_blocks} blocks")
        blocks.num_tokens = max(blocks.num_tokens, upto_tokens)
        return NO_GROWTH

    def fork(self, source: SequenceBlocks, num_tokens: int | None = None) -> SequenceBlocks:
        raise EngineError("nothing is shared between reserved chunks: submit each sample as a request of its own")

    def free(self, blocks: SequenceBlocks) -> None:
        assert isinstance(blocks, ReservedBlocks)
        if blocks.chunk is None:
            return
        self._buddy.free(blocks.chunk)
        self.pool.num_free += chunk_size(self._units(blocks))
        self._hold(blocks, -1)
        blocks.chunk = None
        blocks.tables[0].clear()
        blocks.num_tokens = 0

    def _hold(self, blocks: ReservedBlocks, sign: int) -> None:
        self.held.final += sign * blocks.final_slots
        self.held.policy += sign * blocks.policy_slots

    def _units(self, blocks: SequenceBlocks) -> int:
        assert isinstance(blocks, ReservedBlocks)
        return -(-blocks.policy_slots // self.block_size)
