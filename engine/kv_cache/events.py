"""What the prefix cache stores and forgets, in order, for whoever keeps a copy of its index elsewhere.

Blocks are told of as *stored* when they become findable, and as *removed* when they are not any more, in each tier by
itself. A copy that starts empty with the cache and follows the events has at the end of every step the names that the
tiers' indexes have (`tests/kv_cache/test_kv_cache_state_machine.py`).
"""

from __future__ import annotations

from collections.abc import Sequence as Tokens

import msgspec

from engine.kv_cache.hash_chain import HashChain, key_of, parts_of


class Stored(msgspec.Struct, frozen=True, gc=False):
    """Blocks that follow each other in one sequence are found from now on."""

    on_host: bool
    """in the host tier; else on the device"""
    group: int
    """of layers"""
    digests: list[bytes]
    parent: bytes | None
    """the digest before; None: they are the head of a sequence"""
    token_ids: list[int]
    """of all these blocks"""
    salt: str | None
    """what the digest of a sequence's first block was rooted in"""


class Removed(msgspec.Struct, frozen=True, gc=False):
    """Blocks are not found any more."""

    on_host: bool
    group: int
    digests: list[bytes]


class Cleared(msgspec.Struct, frozen=True, gc=False):
    """Nothing is found any more, in neither tier."""


KVEvent = Stored | Removed | Cleared


class _Meaning(msgspec.Struct, gc=False):
    """What a name stands for, while it is found in any tier."""

    parent: bytes | None
    salt: str | None
    token_ids: list[int]
    tiers: int = 0
    """in which it is found"""


class KVEventLog:
    """Events since the last `take`. Told by `KVCache`, `BlockPool` and `HostTier`; not thread-safe."""

    def __init__(self, block_size: int, has_host: bool) -> None:
        """`has_host`: blocks may move between tiers, so what they hold is remembered as long as they are found."""
        self._block_size, self._has_host = block_size, has_host
        self._events: list[KVEvent] = []
        self._meanings: dict[bytes, _Meaning] = {}

    def take(self) -> list[KVEvent]:
        events, self._events = self._events, []
        return events

    def stored(self, chain: HashChain, group: int, new: list[int], tokens: Tokens[int], on_host: bool = False) -> None:
        """Blocks of these indexes, in order, of a sequence with these tokens became findable in a tier that did not
        take them from the other one."""
        size, digests, begin = self._block_size, chain.digests, 0
        for end in range(1, len(new) + 1):
            if end < len(new) and new[end] == new[end - 1] + 1:
                continue
            first, last = new[begin], new[end - 1] + 1
            parent, salt = _before(chain, first)
            token_ids = list(tokens[first * size : last * size])
            self._events.append(Stored(on_host, group, digests[first:last], parent, token_ids, salt))
            begin = end
        if self._has_host:
            for index in new:
                token_ids = list(tokens[index * size : (index + 1) * size])
                name = key_of(digests[index], group)
                self._meanings.setdefault(name, _Meaning(*_before(chain, index), token_ids)).tiers += 1

    def moved(self, key: bytes, to_host: bool) -> None:
        """A block that one tier has became findable in the other one, too."""
        meaning, (digest, group) = self._meanings[key], parts_of(key)
        meaning.tiers += 1
        last = self._events[-1] if self._events else None
        where = (to_host, group, meaning.parent)
        if isinstance(last, Stored) and (last.on_host, last.group, last.digests[-1]) == where:
            last.digests.append(digest)
            last.token_ids.extend(meaning.token_ids)
            return
        token_ids = meaning.token_ids.copy()
        self._events.append(Stored(to_host, group, [digest], meaning.parent, token_ids, meaning.salt))

    def lost_on_device(self, key: bytes) -> None:
        self._lost(key, on_host=False)

    def lost_on_host(self, key: bytes) -> None:
        self._lost(key, on_host=True)

    def _lost(self, key: bytes, on_host: bool) -> None:
        digest, group = parts_of(key)
        last = self._events[-1] if self._events else None
        if isinstance(last, Removed) and (last.on_host, last.group) == (on_host, group):
            last.digests.append(digest)
        else:
            self._events.append(Removed(on_host, group, [digest]))
        if self._has_host:
            self._meanings[key].tiers -= 1
            if not self._meanings[key].tiers:
                del self._meanings[key]

    def cleared(self) -> None:
        """Nothing is found any more; what happened since the last `take` is of no interest."""
        self._events = [Cleared()]


def _before(chain: HashChain, index: int) -> tuple[bytes | None, str | None]:
    """The digest that block ``index`` follows, or what the first one was rooted in."""
    return (chain.digests[index - 1], None) if index else (None, chain.salt)
