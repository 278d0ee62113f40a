"""A step over paged sequences with cached prefixes, for any backend and device: random KV, shuffled pages, NaN in
unused slots. Inputs are drawn on the CPU, so that a case is the same on every device."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from attention_backends.interface import AttentionBackend, AttentionBatch, AttentionLayer

PADDING = 3  # tokens beyond num_tokens; forward must not touch them
FP8, FP8_MAX, FP8_NAN = torch.float8_e4m3fn, 448.0, 0x7F


def rounded_to_int8(x: torch.Tensor) -> torch.Tensor:
    """x [tokens, heads, dim] as an int8 cache holds it, in float64."""
    top = x.float().abs().amax(dim=-1, keepdim=True)
    inverse = torch.tensor(127.0) / top  # a Python number over a tensor would be two roundings
    return (x.float() * inverse).round().double() * (top * (1.0 / 127.0)).double()


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
    device: str = "cpu"
    kv_dtype: torch.dtype | None = None
    """of the cache where it is not `dtype`: float8_e4m3fn, or int8 with a scale for each token and head"""
    k_scale: float = 1.0
    """a power of two, so that dividing by it or multiplying by its inverse is the same"""
    v_scale: float = 1.0
    sinks: bool = False
    chunk: int | None = None
    shares: bool = False
    """the step's keys and values are in the cache already, and others are handed in"""
    apart: int = 0
    """elements between two blocks of the cache that are not the layer's: NaN before and after the call"""
    graph_size: int | None = None
    """a decode padded to this many sequences; those beyond `lengths` have length 0"""

    @property
    def layer(self) -> AttentionLayer:
        generator = torch.Generator().manual_seed(self.seed + 3)
        sinks = torch.randn(self.num_heads, generator=generator).to(self.device) if self.sinks else None
        return AttentionLayer(
            num_heads=self.num_heads,
            num_kv_heads=self.num_kv_heads,
            head_dim=self.head_dim,
            scale=self.head_dim**-0.5,
            window=self.window,
            soft_cap=self.soft_cap,
            sinks=sinks,
            k_scale=self.k_scale,
            v_scale=self.v_scale,
            chunk=self.chunk,
            shares=0 if self.shares else None,
        )

    @property
    def out_dim(self) -> int:
        return self.head_dim

    @property
    def padded_lengths(self) -> list[tuple[int, int]]:
        """`lengths`, and (1, 0) for each sequence that only fills up a graph"""
        return [*self.lengths, *[(1, 0)] * (0 if self.graph_size is None else self.graph_size - len(self.lengths))]

    @property
    def num_tokens(self) -> int:
        """those of padding sequences included"""
        return sum(queries for queries, _ in self.padded_lengths)

    @property
    def num_blocks(self) -> int:
        return sum(-(-length // self.block_size) for _, length in self.lengths) + 3

    def qkv(self) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Views of one merged tensor [tokens + PADDING, (heads + 2 kv heads) * head_dim], like a projection's."""
        torch.manual_seed(self.seed)
        widths = [self.num_heads, self.num_kv_heads, self.num_kv_heads]
        merged = torch.randn(self.num_tokens + PADDING, sum(widths) * self.head_dim)
        merged[:, : self.num_heads * self.head_dim] *= self.spread
        parts = merged.to(self.dtype).to(self.device).split([width * self.head_dim for width in widths], dim=1)
        q, k, v = (part.unflatten(1, (width, self.head_dim)) for part, width in zip(parts, widths, strict=True))
        return q, k, v

    def prefix(self) -> tuple[torch.Tensor, torch.Tensor]:
        """k, v [all cached tokens, kv heads, head_dim], sequence after sequence"""
        generator = torch.Generator().manual_seed(self.seed + 1)
        count = sum(length - queries for queries, length in self.lengths)
        shape = (2, count, self.num_kv_heads, self.head_dim)
        k, v = torch.randn(shape, generator=generator).to(self.dtype).to(self.device)
        return k, v

    def rounded(self, k: torch.Tensor, v: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """k, v as an 8-bit cache holds them, in float64; unchanged where the cache is not 8-bit."""
        if self.kv_dtype is None:
            return k, v
        if self.kv_dtype == torch.int8:
            return rounded_to_int8(k), rounded_to_int8(v)
        pairs = ((k, self.k_scale), (v, self.v_scale))
        k, v = ((x.float() / s).clamp(-FP8_MAX, FP8_MAX).to(self.kv_dtype).double() * s for x, s in pairs)
        return k, v

    def block_tables(self) -> torch.Tensor:
        """Pages in random order; columns that a sequence does not use (or that its window has left) name no block."""
        generator = torch.Generator().manual_seed(self.seed + 2)
        free = torch.randperm(self.num_blocks, generator=generator, dtype=torch.int32).tolist()
        widest = max((-(-length // self.block_size) for _, length in self.lengths), default=0)
        tables = torch.full((len(self.padded_lengths), max(1, widest)), 2**30, dtype=torch.int32)
        for seq, (_, length) in enumerate(self.lengths):
            for column in range(-(-length // self.block_size)):
                tables[seq, column] = free.pop()
        return tables

    def slots(self, tables: torch.Tensor, seq: int, begin: int, end: int) -> torch.Tensor:
        at = torch.arange(begin, end)
        tables = tables.cpu()
        return (tables[seq].long()[at // self.block_size] * self.block_size + at % self.block_size).to(self.device)

    def batch(self, tables: torch.Tensor) -> AttentionBatch:
        padded = self.padded_lengths
        queries = torch.tensor([0, *(q for q, _ in padded)], dtype=torch.int32)
        slots = [self.slots(tables, i, n - q, n) for i, (q, n) in enumerate(self.lengths)]
        nowhere = torch.full((len(padded) - len(self.lengths) + PADDING,), -1, device=self.device)
        return AttentionBatch(
            num_seqs=len(padded),
            num_tokens=self.num_tokens,
            max_query_len=max((q for q, _ in padded), default=0),
            max_seq_len=max((n for _, n in padded), default=0),
            query_start_loc=queries.cumsum(0, dtype=torch.int32).to(self.device),
            seq_lens=torch.tensor([n for _, n in padded], dtype=torch.int32).to(self.device),
            block_tables=tables.to(self.device),
            slot_mapping=torch.cat([*slots, nowhere]).long(),
            block_size=self.block_size,
            num_decodes=next((i for i, (q, _) in enumerate(padded) if q != 1), len(padded)),
            query_lens_host=[q for q, _ in self.lengths],
            seq_lens_host=[n for _, n in self.lengths],
            graph_size=self.graph_size,
        )

    def empty_cache(self, backend: AttentionBackend, dtype: torch.dtype) -> torch.Tensor:
        """One layer's cache, all NaN."""
        blocks, *block = self.cache_shape(backend)
        size = math.prod(block)
        return self._nans((blocks, size + self.apart), dtype)[:, self.apart // 2 :][:, :size].view(blocks, *block)

    def cache_shape(self, backend: AttentionBackend) -> tuple[int, ...]:
        return backend.kv_cache_shape(self.num_blocks, self.block_size, self.num_kv_heads, self.head_dim)

    def _nans(self, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        if dtype == torch.int8:  # scales of all ones are NaN
            return torch.full(shape, -1, dtype=dtype, device=self.device)
        if dtype == FP8:
            return torch.full(shape, FP8_NAN, dtype=torch.uint8, device=self.device).view(dtype)
        return torch.full(shape, float("nan"), dtype=dtype, device=self.device)

    def run(self, backend: AttentionBackend, dtype: torch.dtype | None = None) -> torch.Tensor:
        """Output [tokens, heads, head_dim]; `dtype` float64 runs an oracle on exactly the same (rounded) inputs."""
        exact = dtype is not None and dtype != self.dtype
        dtype = dtype or self.dtype
        kv_cache = self.empty_cache(backend, dtype if exact else self.kv_dtype or dtype)
        tables = self.block_tables()
        k, v = self.prefix()
        if exact:
            k, v = (x.to(dtype) for x in self.rounded(k, v))
        cached = [self.slots(tables, i, 0, n - q) for i, (q, n) in enumerate(self.lengths)]
        if sum(map(len, cached)):
            scales = (1.0, 1.0) if exact else (self.k_scale, self.v_scale)
            backend.write_kv(k, v, kv_cache, torch.cat(cached), *scales)
        q, k, v = self.qkv()
        if exact:
            k, v = self.rounded(k, v)
            q, k, v = (x.to(dtype) for x in (q, k, v))
        out = torch.full((*q.shape[:2], self.out_dim), 7.0, dtype=dtype, device=self.device)
        batch = self.batch(tables)
        if self.shares:
            scales = (1.0, 1.0) if exact else (self.k_scale, self.v_scale)
            backend.write_kv(k, v, kv_cache, batch.slot_mapping, *scales)
            k = v = q[:, :0]
        if self.window is not None or self.chunk is not None:  # slots are known: what is forgotten now must not be read
            self._forget_left_blocks(batch.block_tables)
        backend.forward(q, k, v, out, kv_cache, self.layer, backend.build_metadata(batch))
        assert (out[self.num_tokens :] == 7.0).all(), "padding tokens were touched"
        self._check_gaps(kv_cache)
        return out[: self.num_tokens]

    def _check_gaps(self, kv_cache: torch.Tensor) -> None:
        whole = torch.empty(0, dtype=kv_cache.dtype, device=self.device).set_(kv_cache.untyped_storage())
        rows = whole.view(self.num_blocks, -1)
        size, first = kv_cache[0].numel(), self.apart // 2
        for gap in (rows[:, :first], rows[:, first + size :]):
            untouched = self._nans(tuple(gap.shape), kv_cache.dtype)
            assert torch.equal(gap.contiguous().view(torch.uint8), untouched.view(torch.uint8)), "gaps were touched"

    def _forget_left_blocks(self, tables: torch.Tensor) -> None:
        for seq, (queries, length) in enumerate(self.lengths):
            first = max(0, length - queries)
            oldest = max(0, first - self.window + 1) if self.window is not None else 0
            if self.chunk is not None:
                oldest = first // self.chunk * self.chunk
            tables[seq, : oldest // self.block_size] = 2**30
