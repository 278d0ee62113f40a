"""The function that stands in the place of a model's attention: it knows the KV cache and the step, the model knows
neither.

It holds no model, so a model that holds it makes no reference cycle, and its memory goes when the runner does.
"""

from __future__ import annotations

import math
import time
from collections.abc import Sequence
from dataclasses import replace
from itertools import compress

import torch

from attention_backends.interface import AttentionBackend, AttentionBatch, AttentionLayer, Latent, NativeLayer
from engine.config import EngineConfig
from engine.errors import EngineError
from engine.kv_transfer.layout import layout_of
from engine.kv_transfer.memory import KVMemory, Pages
from engine.kv_transfer.rank_caches import shared_caches
from engine.layer_groups import LayerGroup, State
from engine.models.facts import ModelFacts
from engine.runner.block_copies import independent
from engine.runner.context import ContextGroup
from engine.runner.state_caches import StateCaches
from engine.step import Rows, StepPlan


def attention_layers(
    model: ModelFacts, sinks: Sequence[torch.Tensor] = (), latents: Sequence[torch.Tensor] = ()
) -> list[AttentionLayer]:
    """What the backend must know of each layer. `sinks`: float32 [num_heads], of each layer that has them, in order;
    `latents`: likewise what makes keys and values of them (`LatentHeads.kv_b`). Raises ValueError if they are not as
    many."""
    wanted = sum(layer.sinks for layer in model.layers)
    if len(sinks) != wanted:
        raise ValueError(f"{model.family}: sinks of {len(sinks)} layers are given, {wanted} layers have them")
    wanted = sum(layer.latent is not None for layer in model.layers)
    if len(latents) != wanted:
        raise ValueError(f"{model.family}: matrices of {len(latents)} layers are given, {wanted} layers keep latents")
    given, matrices = iter(sinks), iter(latents)
    return [
        AttentionLayer(
            num_heads=layer.num_heads,
            num_kv_heads=layer.num_kv_heads,
            head_dim=layer.head_dim,
            scale=layer.scale,
            window=layer.window,
            soft_cap=layer.soft_cap,
            sinks=next(given) if layer.sinks else None,
            chunk=layer.chunk,
            shares=layer.shares,
            latent=None if layer.latent is None else Latent(next(matrices), layer.latent.v_head_dim),
        )
        for layer in model.layers
    ]


_TIMED_BLOCKS, _TIMED_RUNS = 32, 3

Pairs = Sequence[tuple[int, int]]


class PagedAttention:
    """Every layer's KV cache and the current step's metadata, bound to one backend.

    A block is a part of each *cache*, which groups use in turn: layer i of a group has its keys and values in cache
    i // together, with its group's block tables. Layers that are alike have a cache for themselves in each group;
    where a group has smaller ones, several lie beside each other in what a block has there. A layer that shares
    another's keys and values is in no group: it uses that one's.
    """

    def __init__(
        self,
        backend: AttentionBackend,
        layers: Sequence[AttentionLayer],
        dtype: torch.dtype,
        groups: Sequence[LayerGroup] | None = None,
        context: ContextGroup | None = None,
        states: StateCaches | None = None,
    ) -> None:
        """`dtype`: of keys and values in the cache. `groups`: None for one of all layers. `context`: ranks that divide
        positions; then `layers` are whole, and each rank has a part of every block. `states`: of the last group; None:
        there are none, although other stages of the model may have some, and then this one such a group."""
        groups = groups or [LayerGroup(tuple(i for i, layer in enumerate(layers) if layer.shares is None))]
        self.backend = backend
        self._layers = list(layers)
        self._context = context
        self.states = states
        self._dtype = dtype
        group_of = {layer: index for index, group in enumerate(groups) for layer in group.layers}
        self._keeper = [layer if each.shares is None else each.shares for layer, each in enumerate(layers)]
        """whose keys and values each layer reads"""
        self._group_of = [group_of[keeper] for keeper in self._keeper]
        self._groups = tuple(groups)
        self._kv_caches: list[torch.Tensor] = []
        self._of_layer: dict[int, torch.Tensor] = {}
        """each keeper's part of a cache"""
        self._host_caches: list[torch.Tensor] = []
        self._metadata: list[object] = []
        self._num_tokens = 0

    def block_bytes(self, block_size: int) -> int:
        """A page: one block over all layers of a group."""
        return sum(self._places(block_size)[1]) * self._dtype.itemsize

    def _places(self, block_size: int) -> tuple[dict[int, tuple[int, int]], list[int]]:
        """Of each layer, which cache its blocks are in and at which element; and the elements of a block in each."""
        places: dict[int, tuple[int, int]] = {}
        sizes: list[int] = []
        for group in self._groups:
            filled = 0
            for index, layer in enumerate(group.layers):
                cache, place = divmod(index, group.together)
                start = filled if place else 0
                filled = start + math.prod(self._block_shape(layer, block_size))
                places[layer] = cache, start
                sizes += [0] * (cache + 1 - len(sizes))
                sizes[cache] = max(sizes[cache], filled)
        if not sizes and self.states is not None:  # of a stage in which no layer attends
            sizes = [self.states.page_bytes // self._dtype.itemsize]
        return places, sizes

    def _block_shape(self, layer: int, block_size: int) -> tuple[int, ...]:
        heads = self._layers[layer]
        if self._context is not None:
            block_size //= self._context.part.size
        if heads.latent is not None:
            return self.backend.latent_cache_shape(1, block_size, heads.head_dim)[1:]
        return self.backend.kv_cache_shape(1, block_size, heads.num_kv_heads, heads.head_dim)[1:]

    def workspace_bytes(self, max_num_seqs: int) -> int:
        """The backend's scratch memory."""
        return self.backend.workspace_bytes(max_num_seqs, self._layers, len(self._groups))

    def allocate(
        self,
        num_blocks: int,
        num_host_blocks: int,
        block_size: int,
        device: torch.device,
        pages_fd: int | None = None,
    ) -> None:
        """Allocate the caches, zeroed: what is never written must not be NaN where a kernel multiplies it by 0.
        `pages_fd`: what they are to lie in, on a CPU."""
        places, sizes = self._places(block_size)
        if pages_fd is not None:
            block_bytes = [size * self._dtype.itemsize for size in sizes]
            self._kv_caches, self._host_caches = (
                [torch.from_numpy(cache).view(self._dtype) for cache in caches]
                for caches in shared_caches(pages_fd, block_bytes, num_blocks, num_host_blocks)
            )
        else:
            self._kv_caches = [torch.zeros(num_blocks, size, dtype=self._dtype, device=device) for size in sizes]
            self._host_caches = [
                torch.empty(num_host_blocks, size, dtype=self._dtype, pin_memory=device.type == "cuda")
                for size in sizes
                if num_host_blocks
            ]
        for layer, (cache, start) in places.items():
            shape = self._block_shape(layer, block_size)
            blocks = self._kv_caches[cache][:, start : start + math.prod(shape)]
            self._of_layer[layer] = blocks.view(num_blocks, *shape)
        if self.states is not None:
            self.states.allocate(self._kv_caches)

    @property
    def allocated(self) -> bool:
        return bool(self._kv_caches)

    def kv_memory(self, config: EngineConfig) -> KVMemory:
        """The caches of a CPU, and of its host tier, as bytes. Raises EngineError on another device."""
        if any(cache.device.type != "cpu" for cache in self._kv_caches):
            raise EngineError("the KV cache is not in this process' memory")
        device, host = (
            Pages([cache.view(torch.uint8).numpy() for cache in caches])
            for caches in (self._kv_caches, self._host_caches)
        )
        shapes = [self._block_shape(layer, config.cache.block_size) for layer in sorted(self._of_layer)]
        windows = [group.window for group in self._groups]
        return KVMemory(device, host, layout_of(config, self.backend.name, shapes, windows))

    def apply(self, plan: StepPlan) -> None:
        """What a step's plan says of blocks, before it is computed."""
        if self.states is not None:
            self.states.place(plan.bundles, plan.block_appends, len(self._groups) - 1)
            self.states.drafts.release(plan.released)
        self.move_blocks(plan.swap_out, plan.swap_in, plan.block_copies)
        if self.states is not None:
            self.states.clean(plan.cleaned)

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

    def begin_step(self, batches: Sequence[AttentionBatch], rows: Rows | None = None) -> None:
        """The calls of `attend` that follow belong to these, one for each layer group. `rows`: the step's, to which
        those of the states' `mix` belong; None: there are none."""
        self._num_tokens = batches[0].num_tokens
        if self.states is not None and rows is not None:
            self.states.begin_step(batches[-1], rows)
        attending = (not isinstance(group.window, State) for group in self._groups)
        self._metadata = [self._metadata_of(batch) for batch in compress(batches, attending)]

    def begin_pass(self, batch: AttentionBatch) -> None:
        """The calls of `attend` that follow belong to this, and to layers of its group alone."""
        self._num_tokens = batch.num_tokens
        self._metadata = [None] * batch.group + [self._metadata_of(batch)]

    def _metadata_of(self, batch: AttentionBatch) -> object:
        return self.backend.build_metadata(batch if self._context is None else self._context.batch(batch))

    def native_layer(self, layer: int, dtype: torch.dtype) -> NativeLayer | None:
        """A layer's attention with queries of `dtype` for a caller in native code, once the caches are allocated; None:
        there is none. Its holder holds this, too."""
        heads, cache = self._layers[layer], self._of_layer[self._keeper[layer]]
        if self._context is None:
            native = self.backend.native_layer(heads, cache, dtype)
        else:
            native = self._context.native_layer(self.backend, heads, layer, cache, dtype)
        return native and replace(native, step=self._group_of[layer])

    def native_steps(self) -> list[torch.Tensor]:
        """The current step for such a caller, of each layer group; valid until the next `begin_step`."""
        return [self.backend.native_step(metadata) for metadata in self._metadata]

    def attend(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, out: torch.Tensor, layer: int) -> None:
        """`pageloom::attention`, bound: shapes as there.

        Tokens beyond the step's are padding, which backends do not touch: their rows of `out` become zero, so that what
        the next piece makes of them is finite.
        """
        cache, metadata = self._of_layer[self._keeper[layer]], self._metadata[self._group_of[layer]]
        if self._context is None:
            self.backend.forward(q, k, v, out, cache, self._layers[layer], metadata)
        elif self._num_tokens:
            real = slice(self._num_tokens)
            qkv = q[real], k[real], v[real]
            self._context.attend(self.backend, qkv, out[real], cache, self._layers[layer], layer, metadata)
        if out.size(0) > self._num_tokens:
            out[self._num_tokens :].zero_()


def _synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
