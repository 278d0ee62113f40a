"""A step over paged rows of latents, for any backend and device."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from paged_case import PADDING, Case

from attention_backends.interface import AttentionBackend, AttentionLayer, Latent


@dataclass(frozen=True)
class LatentCase(Case):
    rank: int = 64
    common: int = 16
    """of a key, what all heads have"""
    made: int = 24
    """of a head's key"""
    value_dim: int = 40

    @property
    def layer(self) -> AttentionLayer:
        generator = torch.Generator().manual_seed(self.seed + 4)
        shape = (self.num_heads * (self.made + self.value_dim), self.rank)
        weight = (torch.randn(shape, generator=generator) * self.rank**-0.5).to(self.dtype).to(self.device)
        sizes = {"num_kv_heads": 1, "head_dim": self.rank + self.common, "scale": (self.made + self.common) ** -0.5}
        return replace(super().layer, **sizes, latent=Latent(weight, self.value_dim))

    @property
    def out_dim(self) -> int:
        return self.value_dim

    def cache_shape(self, backend: AttentionBackend) -> tuple[int, ...]:
        return backend.latent_cache_shape(self.num_blocks, self.block_size, self.rank + self.common)

    def qkv(self) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        torch.manual_seed(self.seed)
        q = torch.randn(self.num_tokens + PADDING, self.num_heads, self.made + self.common).to(self.dtype)
        rows = torch.randn(self.num_tokens + PADDING, 1, self.rank + self.common).to(self.dtype).to(self.device)
        return q.to(self.device), rows, rows

    def prefix(self) -> tuple[torch.Tensor, torch.Tensor]:
        generator = torch.Generator().manual_seed(self.seed + 1)
        count = sum(length - queries for queries, length in self.lengths)
        rows = torch.randn(count, 1, self.rank + self.common, generator=generator).to(self.dtype).to(self.device)
        return rows, rows
