"""Which replica has which blocks of prompts: told by the replicas themselves, and until then expected."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from engine.core.wire import KVDigests

_NOTHING = 0


class PrefixIndex:
    """Digests of blocks (`engine.kv_cache.hash_chain`), each with a bit for each replica that has it.

    A replica tells what it stores and forgets with the step that does so. What has been sent to it and is not computed
    yet is expected there (`expect`), so that a burst of prompts that begin alike finds together.
    """

    def __init__(self) -> None:
        self._stored: dict[bytes, int] = {}
        self._expected: dict[bytes, dict[int, int]] = {}
        """how many requests under way will bring a block to a replica"""

    def __len__(self) -> int:
        """Digests that some replica has."""
        return len(self._stored)

    def observe(self, replica: int, told: KVDigests) -> None:
        """What it has told of its prefix cache."""
        if told.cleared:
            self.forget(replica)
        table, bit = self._stored, 1 << replica
        self._remove(replica, told.removed)
        for digest in told.stored:
            table[digest] = table.get(digest, _NOTHING) | bit

    def forget(self, replica: int) -> None:
        """It has nothing: its cache was cleared, or it is gone. What is expected stays."""
        self._remove(replica, list(self._stored))

    def _remove(self, replica: int, digests: Iterable[bytes]) -> None:
        table, others = self._stored, ~(1 << replica)
        for digest in digests:
            if left := table.get(digest, _NOTHING) & others:
                table[digest] = left
            else:
                table.pop(digest, None)

    def expect(self, replica: int, digests: Sequence[bytes]) -> None:
        for digest in digests:
            counts = self._expected.setdefault(digest, {})
            counts[replica] = counts.get(replica, 0) + 1

    def expect_no_more(self, replica: int, digests: Sequence[bytes]) -> None:
        """Once for each `expect`."""
        for digest in digests:
            counts = self._expected[digest]
            counts[replica] -= 1
            if not counts[replica]:
                del counts[replica]
            if not counts:
                del self._expected[digest]

    def matched(self, digests: Iterable[bytes], replicas: Iterable[int]) -> dict[int, int]:
        """Of each replica, how many of the first `digests` it has or is to have, without a gap; asks for no
        more of them than somebody has."""
        counts = dict.fromkeys(replicas, 0)
        left = sum(1 << replica for replica in counts)
        for digest in digests:
            left &= self._holders(digest)
            if not left:
                break
            for replica in counts:
                counts[replica] += left >> replica & 1
        return counts

    def _holders(self, digest: bytes) -> int:
        holders = self._stored.get(digest, _NOTHING)
        for replica in self._expected.get(digest, ()):
            holders |= 1 << replica
        return holders
