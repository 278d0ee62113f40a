"""The function that stands in the place of a model's attention: it knows the KV cache and the step, the model knows
neither.

It holds no model, so a model that holds it makes no reference cycle, and its memory goes when the runner does.
"""

from __future__ import annotations

import math
import time
from collections.abc import Sequence
from dataclasses import replace

import torch

from attention_backends.interface import AttentionBackend, AttentionBatch, AttentionLayer, NativeLayer
from engine.errors import EngineError
from engine.layer_groups import LayerGroup
from engine.models.facts import ModelFacts
from engine.runner.block_copies import independent


def attention_layers(model: ModelFacts, sinks: Sequence[torch.Tensor] = ()) -> list[AttentionLayer]:
    """What the backend must know of each layer. `sinks`: float32 [num_heads], of each layer that has them, in order;
    raises ValueError if they are not as many."""
    wanted = sum(layer.sinks for layer in model.layers)
    if len(sinks) != wanted:
        raise ValueError(f"{model.family}: sinks of {len(sinks)} layers are given, {wanted} layers have them")
    given = iter(sinks)
    return [
        AttentionLayer(
            num_heads=layer.num_heads,
            num_kv_heads=layer.num_kv_heads,
            head_dim=layer.head_dim,
            scale=layer.scale,
            window=layer.window,
            soft_cap=layer.soft_cap,
            sinks=next(given) if layer.sinks else None,
        )
        for layer in model.layers
    ]


_TIMED_BLOCKS, _TIMED_RUNS = 32, 3

Pairs = Sequence[tuple[int, int]]


class PagedAttention:
    """Every layer's KV cache and the current step's metadata, bound to one backend.

    There are as many caches as layers in a group: layer i of each group uses cache i, with its group's block tables.
    """

    def __init__(
        self,
        backend: AttentionBackend,
        layers: Sequence[AttentionLayer],
        dtype: torch.dtype,
        groups: Sequence[LayerGroup] | None = None,
    ) -> None:
        """`dtype`: of keys and values in the cache. `groups`: None for one of all layers."""
        groups = groups or [LayerGroup(tuple(range(len(layers))))]
        self.backend = backend
        self._layers = list(layers)
        self._dtype = dtype
        self._group_of = {layer: index for index, group in enumerate(groups) for layer in group.layers}
        self._cache_of = {layer: index for group in groups for index, layer in enumerate(group.layers)}
        self._num_groups = len(groups)
        self._kv_caches: list[torch.Tensor] = []
        self._host_caches: list[torch.Tensor] = []
        self._metadata: list[object] = []
        self._num_tokens = 0

    def block_bytes(self, block_size: int) -> int:
        """One block over all layers of a group."""
        size = sum(torch.Size(self._cache_shape(cache, 1, block_size)).numel() for cache in self._caches())
        return size * torch.empty(0, dtype=self._dtype).element_size()

    def _caches(self) -> range:
        return range(max(self._cache_of.values()) + 1)

    def _cache_shape(self, cache: int, num_blocks: int, block_size: int) -> tuple[int, ...]:
        """Raises ValueError: layers that are to share it have heads of different shapes."""
        layers = [self._layers[layer] for layer, index in self._cache_of.items() if index == cache]
        shapes = {(layer.num_kv_heads, layer.head_dim) for layer in layers}
        if len(shapes) != 1:
            raise ValueError(f"layers of several groups share a cache, but their heads differ: {sorted(shapes)}")
        return self.backend.kv_cache_shape(num_blocks, block_size, *shapes.pop())

    def workspace_bytes(self, max_num_seqs: int) -> int:
        """The backend's scratch memory."""
        return self.backend.workspace_bytes(max_num_seqs, self._layers, self._num_groups)

    def allocate(self, num_blocks: int, num_host_blocks: int, block_size: int, device: torch.device) -> None:
        """Allocate the caches, zeroed: what is never written must not be NaN where a kernel multiplies it by 0."""
        self._kv_caches, self._host_caches = [], []
        pinned = device.type == "cuda"
        for cache in self._caches():
            shape = self._cache_shape(cache, num_blocks, block_size)
            self._kv_caches.append(torch.zeros(shape, dtype=self._dtype, device=device))
            if num_host_blocks:
                shape = self._cache_shape(cache, num_host_blocks, block_size)
                self._host_caches.append(torch.empty(shape, dtype=self._dtype, pin_memory=pinned))

    @property
    def allocated(self) -> bool:
        return bool(self._kv_caches)

    def move_blocks(self, swap_out: Pairs, swap_in: Pairs, copies: Pairs) -> None:
        """To the host, from it, and within the device: (source, destination) in every layer, with the effect of one
        after the other. Raises EngineError where there is no host tier."""
        if (swap_out or swap_in) and not self._host_caches:
            raise EngineError("a step swaps KV blocks, but allocate() was called without host blocks")
        for sources, destinations, pairs in (
            (self._kv_caches, self._host_caches, swap_out),
            (self._host_caches, self._kv_caches, swap_in),
        ):
            for batch in independent([(source, ~destination) for source, destination in pairs]):
                self.backend.swap_blocks(sources, destinations, [(source, ~there) for source, there in batch])
        for batch in independent(copies):
            self.backend.copy_blocks(self._kv_caches, batch)

    def time_swap(self, device: torch.device) -> float:
        """Seconds that a block takes to the host and back, of several at once; 0: there is no host tier. What a step
        left in those blocks stays."""
        if not self._host_caches:
            return 0.0
        pairs = [(block, block) for block in range(min(_TIMED_BLOCKS, *(len(c) for c in self._caches_of_both())))]
        best = math.inf
        for _ in range(_TIMED_RUNS):
            _synchronize(device)
            began = time.perf_counter()
            self.move_blocks(pairs, pairs, [])
            _synchronize(device)
            best = min(best, time.perf_counter() - began)
        return best / len(pairs)

    def _caches_of_both(self) -> tuple[torch.Tensor, torch.Tensor]:
        return self._kv_caches[0], self._host_caches[0]

    def begin_step(self, batches: Sequence[AttentionBatch]) -> None:
        """The calls of `attend` that follow belong to these, one for each layer group."""
        self._num_tokens = batches[0].num_tokens
        self._metadata = [self.backend.build_metadata(batch) for batch in batches]

    def begin_pass(self, batch: AttentionBatch) -> None:
        """The calls of `attend` that follow belong to this, and to layers of its group alone."""
        self._num_tokens = batch.num_tokens
        self._metadata = [None] * batch.group + [self.backend.build_metadata(batch)]

    def native_layer(self, layer: int, dtype: torch.dtype) -> NativeLayer | None:
        """A layer's attention with queries of `dtype` for a caller in native code, once the caches are allocated; None:
        there is none. Its holder holds this, too."""
        native = self.backend.native_layer(self._layers[layer], self._kv_caches[self._cache_of[layer]], dtype)
        return native and replace(native, step=self._group_of[layer])

    def native_steps(self) -> list[torch.Tensor]:
        """The current step for such a caller, of each layer group; valid until the next `begin_step`."""
        return [self.backend.native_step(metadata) for metadata in self._metadata]

    def attend(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, out: torch.Tensor, layer: int) -> None:
        """`pageloom::attention`, bound: shapes as there.

        Tokens beyond the step's are padding, which backends do not touch: their rows of `out` become zero, so that what
        the next piece makes of them is finite.
        """
        cache, metadata = self._kv_caches[self._cache_of[layer]], self._metadata[self._group_of[layer]]
        self.backend.forward(q, k, v, out, cache, self._layers[layer], metadata)
        if out.size(0) > self._num_tokens:
            out[self._num_tokens :].zero_()


def _synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
