"""Names for what a KV block holds: a chain of digests over (parent, tokens), rooted in the cache salt and the adapter.

The KV of a token depends on every token before it, so a block's name must too: digest i = H(digest i-1, tokens of
block i). A real hash (BLAKE2b, 256 bits), because a collision would silently answer one user from another user's
context.
"""

from __future__ import annotations

from collections.abc import Callable
from collections.abc import Sequence as Tokens
from functools import cache
from hashlib import blake2b
from struct import Struct

_DIGEST_BYTES = 32


class HashChain:
    """Digests of one sequence's full blocks, computed once each, in order, when first asked for.

    The sequence's tokens may only grow: a digest, once computed, stays.
    """

    __slots__ = ("_block_size", "_pack", "_root", "digests", "salt")

    def __init__(self, block_size: int, salt: str | None, adapter: str | None = None) -> None:
        self.salt, self._block_size, self._pack = salt, block_size, _packing(block_size)
        # The prefix byte keeps "no salt" apart from the empty salt.
        extra = b"\0" if salt is None else b"\1" + salt.encode("utf-8", "surrogatepass")
        if adapter is not None:
            name = adapter.encode("utf-8", "surrogatepass")
            extra = b"\2" + len(name).to_bytes(8, "little") + name + extra
        self._root = blake2b(extra, digest_size=_DIGEST_BYTES, person=b"kv-prefix-root").digest()
        self.digests: list[bytes] = []

    def digest(self, index: int, tokens: Tokens[int]) -> bytes:
        """Name of block ``index``; ``tokens`` are the sequence's tokens from position 0, at least to the block's
        end."""
        return self.digests_of(index + 1, tokens)[index]

    def digests_of(self, num_blocks: int, tokens: Tokens[int]) -> list[bytes]:
        """Names of the first ``num_blocks`` blocks, at least; not the caller's."""
        digests, size, pack = self.digests, self._block_size, self._pack
        parent = digests[-1] if digests else self._root
        for start in range(len(digests) * size, num_blocks * size, size):
            parent = blake2b(pack(parent, *tokens[start : start + size]), digest_size=_DIGEST_BYTES).digest()
            digests.append(parent)
        return digests

    def become(self, other: HashChain, common: int, num_blocks: int) -> None:
        """The sequence has the tokens of another one of its salt from now on, in ``num_blocks`` blocks; they have been
        alike in the first ``common`` ones."""
        known = min(common, len(self.digests))
        self.digests[known:] = other.digests[known:num_blocks]

    def fork(self, num_blocks: int) -> HashChain:
        """A chain that agrees in the first ``num_blocks`` blocks; what was hashed beyond may differ in the fork."""
        other = HashChain.__new__(HashChain)
        other.salt, other._block_size, other._pack, other._root = self.salt, self._block_size, self._pack, self._root
        other.digests = self.digests[:num_blocks]
        return other


def key_of(digest: bytes, group: int) -> bytes:
    """What a layer group's block of this digest is found by."""
    return digest if group == 0 else digest + group.to_bytes(2, "little")


def parts_of(key: bytes) -> tuple[bytes, int]:
    """The digest and the layer group that a key was made of."""
    return key[:_DIGEST_BYTES], int.from_bytes(key[_DIGEST_BYTES:], "little")


@cache
def _packing(block_size: int) -> Callable[..., bytes]:
    """Of a digest and the tokens of a block: token ids have at most 32 bits, so that a block of 16 tokens and its
    parent's digest are one round of the hash."""
    return Struct(f"<{_DIGEST_BYTES}s{block_size}I").pack
