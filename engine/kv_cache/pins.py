"""Prefixes that their provider pinned: held by nobody's request, found by all, never evicted (the paper's shared
prefixes, §4.4). A pin is computed as a request that generates one token; then its whole blocks are forked and kept."""

from __future__ import annotations

from collections.abc import Iterable

from engine.errors import InvalidRequestError
from engine.kv_cache.kv_cache import KVCache
from engine.kv_cache.sequence_blocks import SequenceBlocks


class Pins:
    def __init__(self, kv: KVCache) -> None:
        self._kv = kv
        self._kept: dict[str, SequenceBlocks] = {}
        self._reserved: dict[str, int] = {}
        """blocks of each pin, also of those that are being computed"""

    @property
    def num_blocks(self) -> int:
        """What requests can not have."""
        return sum(self._reserved.values())

    def reserve(self, name: str, prompt_len: int, max_model_len: int, needs: Iterable[int]) -> None:
        """Before the pin's request is queued. Raises `InvalidRequestError` for what can not be pinned: beside the pins
        there must be room for a sequence of `max_model_len`, and for every live request, which `needs` as many blocks,
        by itself."""
        kv = self._kv
        if name in self._reserved:
            raise InvalidRequestError(f"a prefix named {name!r} is pinned already; unpin it first", "name")
        if not kv.pool.enable_prefix_caching:
            raise InvalidRequestError("prefixes can not be pinned: prefix caching is off", "prompt")
        blocks = kv.blocks_kept(prompt_len // kv.block_size * kv.block_size)
        if blocks == 0:
            raise InvalidRequestError(
                f"a prefix of {prompt_len} tokens fills no block of {kv.block_size} (--block-size)", "prompt"
            )
        room = kv.pool.num_blocks - self.num_blocks - max([kv.blocks_for(max_model_len), *needs])
        if blocks > room:
            raise InvalidRequestError(
                f"a prefix of {prompt_len} tokens needs {blocks} KV blocks, but beside the largest request only {room} "
                f"of {kv.pool.num_blocks} can be pinned (raise --kv-cache-memory, or lower --max-model-len)",
                "prompt",
            )
        self._reserved[name] = blocks

    def keep(self, name: str, blocks: SequenceBlocks, prompt_len: int, computed: int) -> None:
        """To be called whenever the pin's request was placed in a step: its blocks are kept once all are planned."""
        tokens = prompt_len // self._kv.block_size * self._kv.block_size
        if name in self._reserved and name not in self._kept and computed >= tokens:
            self._kept[name] = self._kv.fork(blocks, tokens)

    def settle(self, name: str) -> None:
        """The pin's request ended; if it did before its prefix was computed, nothing is pinned."""
        if name not in self._kept:
            self._reserved.pop(name, None)

    def release(self, name: str) -> None:
        """Its blocks are cached like any others from now on. Unknown names are ignored."""
        kept = self._kept.pop(name, None)
        if kept is not None:
            self._kv.free(kept)
        self._reserved.pop(name, None)
