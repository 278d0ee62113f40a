"""A copy of a cache's index that knows nothing but its events: what a router keeps."""

from __future__ import annotations

from collections.abc import Iterable
from hashlib import blake2b
from struct import pack

from engine.kv_cache.block_pool import BlockPool
from engine.kv_cache.events import Cleared, KVEvent, Stored
from engine.kv_cache.hash_chain import key_of


def index_of(pool: BlockPool) -> set[bytes]:
    keys = map(pool.key_of, range(pool.num_blocks))
    return {key for key in keys if key is not None}


class IndexMirror:
    def __init__(self, block_size: int) -> None:
        self.size = block_size
        self._names: dict[bool, set[bytes]] = {False: set(), True: set()}
        """in the host tier, or not"""

    def names(self, on_host: bool) -> set[bytes]:
        return self._names[on_host]

    def follow(self, events: Iterable[KVEvent]) -> None:
        for event in events:
            if isinstance(event, Cleared):
                self._names = {False: set(), True: set()}
                continue
            keys = {key_of(digest, event.group) for digest in event.digests}
            assert len(keys) == len(event.digests) > 0
            there = self._names[event.on_host]
            if isinstance(event, Stored):
                assert there.isdisjoint(keys), "stored again"
                there |= keys
                self._check_names(event)
            else:
                assert there >= keys, "removed and never stored"
                there -= keys

    def _check_names(self, event: Stored) -> None:
        """They are those of the tokens that are told with them."""
        assert len(event.token_ids) == len(event.digests) * self.size
        parent = event.parent
        if parent is None:
            extra = b"\0" if event.salt is None else b"\1" + event.salt.encode()
            parent = blake2b(extra, digest_size=32, person=b"kv-prefix-root").digest()
        for index, digest in enumerate(event.digests):
            tokens = event.token_ids[index * self.size : (index + 1) * self.size]
            parent = blake2b(parent + pack(f"<{self.size}I", *tokens), digest_size=32).digest()
            assert parent == digest
