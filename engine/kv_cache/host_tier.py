"""The host tier: blocks in host memory for what the device's pool has no room for.

*Held* blocks belong to sequences that were swapped out; *cached* ones are prefixes that were evicted from the device,
and give way to held ones. Both come from one pool, whose index finds what it holds by the same names as the device's.

The tier only decides. Transfers are told with the next plan, which applies them before anything else: first those to
the host, then those to the device. A host block that a planned transfer reads is therefore not free before that plan
is told.
"""

from __future__ import annotations

from engine.kv_cache.block_pool import BlockPool
from engine.kv_cache.events import KVEventLog

Transfers = list[tuple[int, int]]
"""(source block, destination block)"""


class HostTier:
    def __init__(self, num_blocks: int, max_held: int, events: KVEventLog | None = None) -> None:
        """`max_held`: blocks that swapped sequences may hold together; paper §4.5: as many as the device has."""
        self._events = events
        on_lost = events.lost_on_host if events is not None else None
        self.pool = BlockPool(num_blocks, enable_prefix_caching=True, on_lost=on_lost)
        self.max_held = max_held
        self.swapped_out = self.swapped_in = 0
        """blocks transferred since the start"""
        self._out: Transfers = []
        self._in: Transfers = []
        self._read: list[int] = []
        """a reference to each block that a transfer in `_in` reads"""

    def room_for(self, num_new: int) -> bool:
        """Whether as many blocks can be held that nobody holds now."""
        return num_new <= self.pool.num_free and self.pool.num_used + num_new <= self.max_held

    @property
    def writes_pending(self) -> bool:
        """The next plan copies blocks to the tier."""
        return bool(self._out)

    def find(self, key: bytes) -> int | None:
        return self.pool.find(key)

    def keep(self, key: bytes, device_blocks: list[int], is_bundle: bool) -> None:
        """A cached block, or bundle, is evicted from the device: cache it here, in the place of what was of no use for
        longest."""
        found = self.pool.find(key)
        if found is None:
            if self.pool.num_free < len(device_blocks):
                return
            found = self.store(device_blocks, key, is_bundle)
        else:
            self.pool.acquire(found)
        self.pool.release(found)

    def store(self, device_blocks: list[int], key: bytes | None, is_bundle: bool) -> int:
        """A new block or bundle, held once, that takes what the device's blocks hold."""
        block = self.pool.allocate_bundle(len(device_blocks)) if is_bundle else self.pool.allocate()
        if key is not None and self.pool.register(block, key) and self._events is not None:
            self._events.moved(key, to_host=True)
        self._out.extend(zip(device_blocks, self.pool.blocks_of(block), strict=True))
        return block

    def load(self, block: int, device_blocks: list[int]) -> None:
        """Copy a block or bundle that is held or cached to the device; it stays what it is."""
        self.pool.acquire(block)
        self._read.append(block)
        self._in.extend(zip(self.pool.blocks_of(block), device_blocks, strict=True))

    def take_transfers(self) -> tuple[Transfers, Transfers]:
        """(device to host, host to device) since the last call: they belong to the plan that is told now."""
        out, into = self._out, self._in
        for block in self._read:
            self.pool.release(block)
        self._out, self._in, self._read = [], [], []
        self.swapped_out += len(out)
        self.swapped_in += len(into)
        return out, into
