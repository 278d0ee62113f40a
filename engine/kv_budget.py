"""What keys and values of one sequence take, and how long a sequence a given KV cache can hold."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable
from typing import TYPE_CHECKING

import msgspec

from engine.config import EngineArgs, EngineConfig
from engine.layer_groups import LayerGroup, group_layers, most_blocks, with_states
from engine.models.facts import HeadsSpec, ModelFacts
from engine.models.sharding import Span
from engine.models.stages import stage_layers
from engine.sizes import size_text

if TYPE_CHECKING:
    from engine.models.description import ModelDescription

DTYPE_BYTES = {"bfloat16": 2, "float16": 2, "float32": 4, "float8_e4m3fn": 1, "int8": 1}


def kv_bytes_per_token(layers: Iterable[HeadsSpec], dtype: str, ranks: int = 1) -> int:
    """Bytes of keys and values that one token keeps over these layers (int8: with its float32 scales). Each of `ranks`
    that divide the heads has one at least."""
    scale_bytes = 4 if dtype == "int8" else 0
    keep = [layer for layer in layers if layer.shares is None]
    return sum(
        2 * max(layer.num_kv_heads, ranks) * (layer.head_dim * DTYPE_BYTES[dtype] + scale_bytes) for layer in keep
    )


class SequenceSizes(msgspec.Struct, frozen=True, kw_only=True):
    """Of one sequence that may grow to `longest` tokens, computed in steps of up to `step_tokens`."""

    model: ModelFacts
    dtype: str
    block_size: int
    step_tokens: int
    longest: int
    draft_bytes: int = 0
    """that the layers of a draft keep of a token; they share the blocks of one of the groups"""
    ranks: int = 1
    """that share the memory; each keeps what the draft does"""
    stages: tuple[Span, ...] = ()
    """layers of each stage, which share the memory, too; (): one has all"""
    model_dtype: str = "bfloat16"
    """of activations, and so of states"""

    @property
    def groups(self) -> tuple[LayerGroup, ...]:
        sizes = self.model.state_sizes(DTYPE_BYTES[self.model_dtype])
        return with_states(self._attending, sizes, self.block_bytes, self.block_size)

    @property
    def _attending(self) -> tuple[LayerGroup, ...]:
        return group_layers(self.model.kept, self.longest)

    @property
    def block_bytes(self) -> int:
        """Of a block of any group."""
        layers = self.model.layers
        if not self.model.keeps_kv:
            return 0
        token = 0
        for own in self.stages or (Span(0, len(layers)),):
            kept = [[layers[i] for i in group.layers if own.first <= i < own.end] for group in self._attending]
            token += max(kv_bytes_per_token(each, self.dtype, self.ranks) for each in kept)
        return (token + self.draft_bytes * self.ranks) * self.block_size

    def blocks_of(self, tokens: int) -> int:
        """Over all groups."""
        return sum(most_blocks(tokens, group.window, self.block_size, self.step_tokens) for group in self.groups)

    def bytes_of(self, tokens: int) -> int:
        return self.block_bytes * self.blocks_of(tokens)

    def tokens_in(self, memory_bytes: int) -> int:
        """At most `longest`; 0 where not even one fits."""
        if not self.model.keeps_kv:
            return self.longest
        return bisect_right(range(1, self.longest + 1), memory_bytes, key=self.bytes_of)


def shortened_context(
    args: EngineArgs, model: ModelDescription, config: EngineConfig, draft: ModelFacts | None = None
) -> str | None:
    """What to tell a user whose `kv_cache_memory` cut the context below what the model was made for; None: it did
    not. `draft`: of a draft's layers."""
    context, memory = config.model.max_model_len, config.cache.kv_cache_memory
    if memory is None or args.max_model_len is not None or context >= model.max_position:
        return None
    sizes = SequenceSizes(
        model=model.facts,
        dtype=config.cache.dtype,
        block_size=config.cache.block_size,
        step_tokens=config.scheduler.max_num_batched_tokens,
        longest=model.max_position,
        draft_bytes=0 if draft is None else kv_bytes_per_token(draft.layers, config.cache.dtype),
        ranks=config.parallel.kv_copies,
        stages=stage_layers(model.spec, config.parallel.pipeline),
        model_dtype=config.model.dtype,
    )
    enough = size_text(sizes.bytes_of(sizes.longest))
    return (
        f"kv_cache_memory ({size_text(memory)}) cuts the context to {context} tokens, prompt and answer together; the "
        f"model was made for {model.max_position}, which kv_cache_memory={enough} would hold"
    )
