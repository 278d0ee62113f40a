"""A step over paged sequences with cached prefixes, for any backend: random KV, shuffled pages, NaN in unused slots."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from attention_backends.interface import AttentionBackend, AttentionBatch, AttentionLayer

PADDING = 3  # tokens beyond num_tokens; forward must not touch them


@dataclass(frozen=True)
class Case:
    lengths: Sequence[tuple[int, int]]
    """(queries of this step, KV length with them) per sequence"""
    num_heads: int = 4
    num_kv_heads: int = 2
    head_dim: int = 64
    block_size: int = 16
    dtype: torch.dtype = torch.float32
    window: int | None = None
    soft_cap: float | None = None
    seed: int = 0
    spread: float = 1.0
    """multiplies queries: large values make softmax pick few keys"""

    @property
    def layer(self) -> AttentionLayer:
        scale = self.head_dim**-0.5
        return AttentionLayer(self.num_heads, self.num_kv_heads, self.head_dim, scale, self.window, self.soft_cap)

    @property
    def num_tokens(self) -> int:
        return sum(queries for queries, _ in self.lengths)

    @property
    def num_blocks(self) -> int:
        return sum(-(-length // self.block_size) for _, length in self.lengths) + 3

    def qkv(self) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Views of one merged tensor [tokens + PADDING, (heads + 2 kv heads) * head_dim], like a projection's."""
        torch.manual_seed(self.seed)
        widths = [self.num_heads, self.num_kv_heads, self.num_kv_heads]
        merged = torch.randn(self.num_tokens + PADDING, sum(widths) * self.head_dim)
        merged[:, : self.num_heads * self.head_dim] *= self.spread
        parts = merged.to(self.dtype).split([width * self.head_dim for width in widths], dim=1)
        q, k, v = (part.unflatten(1, (width, self.head_dim)) for part, width in zip(parts, widths, strict=True))
        return q, k, v

    def prefix(self) -> tuple[torch.Tensor, torch.Tensor]:
        """k, v [all cached tokens, kv heads, head_dim], sequence after sequence"""
        generator = torch.Generator().manual_seed(self.seed + 1)
        count = sum(length - queries for queries, length in self.lengths)
        shape = (2, count, self.num_kv_heads, self.head_dim)
        k, v = torch.randn(shape, generator=generator).to(self.dtype)
        return k, v

    def block_tables(self) -> torch.Tensor:
        """Pages in random order; columns that a sequence does not use (or that its window has left) name no block."""
        generator = torch.Generator().manual_seed(self.seed + 2)
        free = torch.randperm(self.num_blocks, generator=generator, dtype=torch.int32).tolist()
        widest = max((-(-length // self.block_size) for _, length in self.lengths), default=0)
        tables = torch.full((len(self.lengths), max(1, widest)), 2**30, dtype=torch.int32)
        for seq, (_, length) in enumerate(self.lengths):
            for column in range(-(-length // self.block_size)):
                tables[seq, column] = free.pop()
        return tables

    def slots(self, tables: torch.Tensor, seq: int, begin: int, end: int) -> torch.Tensor:
        at = torch.arange(begin, end)
        return tables[seq].long()[at // self.block_size] * self.block_size + at % self.block_size

    def batch(self, tables: torch.Tensor) -> AttentionBatch:
        queries = torch.tensor([0, *(q for q, _ in self.lengths)], dtype=torch.int32)
        slots = [self.slots(tables, i, n - q, n) for i, (q, n) in enumerate(self.lengths)]
        return AttentionBatch(
            num_seqs=len(self.lengths),
            num_tokens=self.num_tokens,
            max_query_len=max((q for q, _ in self.lengths), default=0),
            max_seq_len=max((n for _, n in self.lengths), default=0),
            query_start_loc=queries.cumsum(0, dtype=torch.int32),
            seq_lens=torch.tensor([n for _, n in self.lengths], dtype=torch.int32),
            block_tables=tables,
            slot_mapping=torch.cat([*slots, torch.full((PADDING,), -1)]).long(),
            block_size=self.block_size,
        )

    def run(self, backend: AttentionBackend, dtype: torch.dtype | None = None) -> torch.Tensor:
        """Output [tokens, heads, head_dim]; `dtype` float64 runs an oracle on exactly the same (rounded) inputs."""
        dtype = dtype or self.dtype
        shape = backend.kv_cache_shape(self.num_blocks, self.block_size, self.num_kv_heads, self.head_dim)
        kv_cache = torch.full(shape, float("nan"), dtype=dtype)
        tables = self.block_tables()
        k, v = self.prefix()
        cached = [self.slots(tables, i, 0, n - q) for i, (q, n) in enumerate(self.lengths)]
        if sum(map(len, cached)):
            backend.write_kv(k.to(dtype), v.to(dtype), kv_cache, torch.cat(cached))
        if self.window is not None:
            self._forget_left_blocks(tables)
        q, k, v = (x.to(dtype) for x in self.qkv()) if dtype != self.dtype else self.qkv()
        out = torch.full(q.shape, 7.0, dtype=dtype)
        batch = self.batch(tables)
        backend.forward(q, k, v, out, kv_cache, self.layer, backend.build_metadata(batch))
        assert (out[self.num_tokens :] == 7.0).all(), "padding tokens were touched"
        return out[: self.num_tokens]

    def _forget_left_blocks(self, tables: torch.Tensor) -> None:
        assert self.window is not None
        for seq, (queries, length) in enumerate(self.lengths):
            oldest = max(0, length - queries - self.window + 1)
            tables[seq, : oldest // self.block_size] = 2**30
