"""The function that stands in the place of a model's attention: it knows the KV cache and the step, the model knows
neither.

It holds no model, so a model that holds it makes no reference cycle, and its memory goes when the runner does.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from attention_backends.interface import AttentionBackend, AttentionBatch, AttentionLayer, NativeLayer
from engine.models.spec import DecoderSpec
from engine.runner.block_copies import independent


def attention_layers(spec: DecoderSpec) -> list[AttentionLayer]:
    """What the backend must know of each layer."""
    return [
        AttentionLayer(
            num_heads=spec.num_heads,
            num_kv_heads=spec.num_kv_heads,
            head_dim=spec.head_dim,
            scale=spec.scale,
            window=layer.window,
            soft_cap=spec.soft_cap,
        )
        for layer in spec.layers
    ]


class PagedAttention:
    """Every layer's KV cache and the current step's metadata, bound to one backend."""

    def __init__(self, backend: AttentionBackend, layers: Sequence[AttentionLayer], dtype: torch.dtype) -> None:
        """`dtype`: of keys and values in the cache."""
        self.backend = backend
        self._layers = list(layers)
        self._dtype = dtype
        self._kv_caches: list[torch.Tensor] = []
        self._metadata: object = None
        self._num_tokens = 0

    def block_bytes(self, block_size: int) -> int:
        """One block over all layers."""
        return (
            sum(
                torch.Size(self.backend.kv_cache_shape(1, block_size, layer.num_kv_heads, layer.head_dim)).numel()
                for layer in self._layers
            )
            * torch.empty(0, dtype=self._dtype).element_size()
        )

    def workspace_bytes(self, max_num_seqs: int) -> int:
        """The backend's scratch memory."""
        return self.backend.workspace_bytes(max_num_seqs, self._layers)

    def allocate(self, num_blocks: int, block_size: int, device: torch.device) -> None:
        """Allocate every layer's cache, zeroed: what is never written must not be NaN where a kernel multiplies it by
        0."""
        self._kv_caches = []
        for layer in self._layers:
            shape = self.backend.kv_cache_shape(num_blocks, block_size, layer.num_kv_heads, layer.head_dim)
            self._kv_caches.append(torch.zeros(shape, dtype=self._dtype, device=device))

    @property
    def allocated(self) -> bool:
        return bool(self._kv_caches)

    def copy_blocks(self, pairs: Sequence[tuple[int, int]]) -> None:
        """(source, destination) in every layer, with the effect of one after the other."""
        for batch in independent(pairs):
            self.backend.copy_blocks(self._kv_caches, batch)

    def begin_step(self, batch: AttentionBatch) -> None:
        """The calls of `attend` that follow belong to `batch`."""
        self._num_tokens = batch.num_tokens
        self._metadata = self.backend.build_metadata(batch)

    def native_layer(self, layer: int, dtype: torch.dtype) -> NativeLayer | None:
        """A layer's attention with queries of `dtype` for a caller in native code, once the caches are allocated; None:
        there is none. Its holder holds this, too."""
        return self.backend.native_layer(self._layers[layer], self._kv_caches[layer], dtype)

    def native_step(self) -> torch.Tensor:
        """The current step for such a caller; valid until the next `begin_step`."""
        return self.backend.native_step(self._metadata)

    def attend(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, out: torch.Tensor, layer: int) -> None:
        """`pageloom::attention`, bound: shapes as there.

        Tokens beyond the step's are padding, which backends do not touch: their rows of `out` become zero, so that what
        the next piece makes of them is finite.
        """
        self.backend.forward(q, k, v, out, self._kv_caches[layer], self._layers[layer], self._metadata)
        if out.size(0) > self._num_tokens:
            out[self._num_tokens :].zero_()
