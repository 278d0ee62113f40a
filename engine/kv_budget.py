"""What keys and values of one sequence take, and how long a sequence a given KV cache can hold."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING

import msgspec

from engine.config import EngineArgs, EngineConfig
from engine.layer_groups import (
    LayerGroup,
    State,
    group_layers,
    most_blocks,
    state_page,
    state_pages,
    state_starts,
    with_states,
)
from engine.models.facts import HeadsSpec, ModelFacts
from engine.models.sharding import Shard, Span, divided_mixer
from engine.models.stages import StageLayers, stage_layers
from engine.sizes import size_text

if TYPE_CHECKING:
    from engine.models.description import ModelDescription

DTYPE_BYTES = {"bfloat16": 2, "float16": 2, "float32": 4, "float8_e4m3fn": 1, "int8": 1}


_LANES = 16
"""numbers that kernels of CPUs load at once: where a head has halves of that, it is kept in whole ones"""


def kv_bytes_per_token(layers: Iterable[HeadsSpec], dtype: str, device: str | None = None) -> int:
    """Bytes of keys and values that one token keeps over these layers (int8: with its float32 scales), as the backends
    of a `device` lay them out; None: the numbers alone."""
    scale_bytes = 4 if dtype == "int8" else 0
    keep = [layer for layer in layers if layer.shares is None]
    return sum(
        layer.kept_arrays * layer.num_kv_heads * (_kept(layer.head_dim, device) * DTYPE_BYTES[dtype] + scale_bytes)
        for layer in keep
    )


def _kept(head_dim: int, device: str | None) -> int:
    padded = device == "cpu" and head_dim % (_LANES // 2) == 0  # others than that are the reference backend's
    return -(-head_dim // _LANES) * _LANES if padded else head_dim


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
    """that divide heads and share the memory; each keeps what the draft does"""
    stages: tuple[StageLayers, ...] = ()
    """layers of each stage, which share the memory, too; (): one has all"""
    model_dtype: str = "bfloat16"
    """of activations, and so of states"""
    device: str | None = None
    """whose backends lay blocks out; None: as small as can be"""

    @property
    def groups(self) -> tuple[LayerGroup, ...]:
        return with_states(self._attending, self._pages, self.block_size)

    @property
    def state(self) -> State | None:
        """What is said of the states' group; None: there is none."""
        window = self.groups[-1].window
        return window if isinstance(window, State) else None

    @property
    def _attending(self) -> tuple[LayerGroup, ...]:
        return group_layers(self.model.kept, self.longest)

    @property
    def _pages(self) -> int:
        return state_pages(list(self._ranks())) if self.model.states else 0

    @property
    def block_bytes(self) -> int:
        """Of a block of any group, in all ranks."""
        if not self.model.keeps_kv:
            return 0
        pages = self._pages
        return sum(page or state_page(state, pages) for page, state in self._ranks())

    def _ranks(self) -> Iterator[tuple[int, int]]:
        """Of each the bytes of a block's keys and values, and of a sequence's states."""
        model, groups = self.model, self._attending
        stages = self.stages or (StageLayers(Span(0, len(model.layers)), Span(0, len(model.states))),)
        for shard in (Shard(rank, self.ranks) for rank in range(self.ranks)):
            layers = [divided_mixer(layer, shard) for layer in model.layers]
            states = [divided_mixer(each, shard).state_bytes(DTYPE_BYTES[self.model_dtype]) for each in model.states]
            for own, keep in stages:
                kept = [[layers[i] for i in group.layers if own.first <= i < own.end] for group in groups]
                token = max(kv_bytes_per_token(each, self.dtype, self.device) for each in kept) + self.draft_bytes
                yield token * self.block_size, state_starts(states[keep.first : keep.end])[-1]

    def blocks_of(self, tokens: int) -> int:
        """Over all groups."""
        return self._blocks_in(self.groups, tokens)

    def _blocks_in(self, groups: tuple[LayerGroup, ...], tokens: int) -> int:
        return sum(most_blocks(tokens, group.window, self.block_size, self.step_tokens) for group in groups)

    def bytes_of(self, tokens: int) -> int:
        return self.block_bytes * self.blocks_of(tokens)

    def tokens_in(self, memory_bytes: int) -> int:
        """At most `longest`; 0 where not even one fits."""
        if not self.model.keeps_kv:
            return self.longest
        groups, blocks = self.groups, memory_bytes // self.block_bytes
        return bisect_right(range(1, self.longest + 1), blocks, key=lambda tokens: self._blocks_in(groups, tokens))


def sequence_sizes(config: EngineConfig, model: ModelDescription, draft: ModelFacts | None = None) -> SequenceSizes:
    """As configured. `draft`: of a draft's layers."""
    kind, dtype = config.device.kind, config.cache.dtype
    return SequenceSizes(
        model=model.facts,
        dtype=dtype,
        block_size=config.cache.block_size,
        step_tokens=config.scheduler.max_num_batched_tokens,
        longest=config.model.max_model_len,
        draft_bytes=0 if draft is None else kv_bytes_per_token(draft.layers, dtype, kind),
        ranks=config.parallel.kv_copies,
        stages=stage_layers(model.spec, config.parallel.pipeline),
        model_dtype=config.model.dtype,
        device=kind,
    )


def shortened_context(
    args: EngineArgs, model: ModelDescription, config: EngineConfig, draft: ModelFacts | None = None
) -> str | None:
    """What to tell a user whose `kv_cache_memory` cut the context below what the model was made for; None: it did
    not. `draft`: of a draft's layers."""
    context, memory = config.model.max_model_len, config.cache.kv_cache_memory
    if memory is None or args.max_model_len is not None or context >= model.max_position:
        return None
    sizes = msgspec.structs.replace(sequence_sizes(config, model, draft), longest=model.max_position)
    enough = size_text(sizes.bytes_of(sizes.longest))
    return (
        f"kv_cache_memory ({size_text(memory)}) cuts the context to {context} tokens, prompt and answer together; the "
        f"model was made for {model.max_position}, which kv_cache_memory={enough} would hold"
    )
