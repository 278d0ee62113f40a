"""Paged attention on CPUs: a thin shell around the in-tree C++ kernels (`csrc/README.md` tells how they work)."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal, NoReturn

import torch

from attention_backends.build import build, find_cached
from attention_backends.context import ContextPart
from attention_backends.cpu_latents import MADE_VALUES, LatentKernels, LatentSizes, Ways, attend_to_latents
from attention_backends.crew import load_library
from attention_backends.interface import (
    AttentionBackend,
    AttentionBatch,
    AttentionLayer,
    AttentionSpec,
    Capabilities,
    ContextHeads,
    NativeLayer,
)
from attention_backends.toolchain import default_cache_dir, find_compiler

Isa = Literal["auto", "portable", "avx2", "avx512", "avx512bf16", "amx"]
ISAS: tuple[Isa, ...] = ("auto", "portable", "avx2", "avx512", "avx512bf16", "amx")

MAX_HEAD_DIM = 640
MAX_BLOCK_SIZE = 1024


@dataclass(frozen=True, slots=True)
class CpuMetadata:
    """One step, as the kernels read it; nothing is copied. The kernels cut the work at the first layer of a kind, and
    again only in the next step."""

    query_start_loc: torch.Tensor
    seq_lens: torch.Tensor
    block_tables: torch.Tensor
    slot_mapping: torch.Tensor
    num_seqs: int
    num_tokens: int
    context: ContextPart
    step: int
    """0: cut at every layer; else of this step only, whose tables do not change"""
    latent_ways: dict[LatentSizes, Ways | None] = field(default_factory=dict)
    """found at the first layer that keeps latents"""


@dataclass(frozen=True, slots=True)
class PlanSummary:
    """How a layer's attention is cut, counted for one KV head."""

    items: int
    shared_items: int
    """items with rows of several sequences, which have these keys' blocks in common"""
    keys: int
    """read by all items: what sequences share counts once"""


def _unprepared(*_: object) -> NoReturn:
    raise RuntimeError("CpuBackend: prepare() builds and loads the kernels; call it once before the first step")


class CpuBackend(AttentionBackend):
    """float32, bfloat16 and float16 caches, and int8 ones for bfloat16 queries; sums in float32 (bfloat16 products in
    hardware where the CPU has them). An int8 cache has a scale for each token and KV head of its own; `k_scale` and
    `v_scale`, which are for fp8, do not matter to it.

    `isa` forces one instruction set (tests, comparisons); "auto" takes the widest that this CPU has. A block size that
    is not a multiple of that ISA's vector (16 tokens for AVX-512) runs on the next narrower one, and so does what AMX
    is not for: float32 and float16, and rows too few to fill a tile (decode).
    """

    name = "cpu"
    speed_rank = 10

    def __init__(self, isa: Isa = "auto") -> None:
        if isa not in ISAS:
            raise ValueError(f"CpuBackend: isa={isa!r} is not one of {', '.join(ISAS)}")
        self._isa = ISAS.index(isa)
        self._paged_attention: Callable[..., None] = _unprepared
        self._write_kv: Callable[..., None] = _unprepared
        self._copy_blocks: Callable[..., None] = _unprepared
        self._describe_plan: Callable[..., tuple[int, int, int]] = _unprepared
        self._new_step: Callable[[], int] = _unprepared
        self._native_attention: Callable[[], int] = _unprepared
        self._merge_parts: Callable[..., None] = _unprepared
        self._head_product: Callable[..., None] = _unprepared
        self._native_layer: Callable[..., tuple[torch.Tensor, int]] = _unprepared
        self._native_step: Callable[..., torch.Tensor] = _unprepared
        self._supported: tuple[Isa, ...] = ()
        self._kv_dtype: torch.dtype | None = None
        self._invariant = False

    @classmethod
    def capabilities(cls) -> Capabilities:
        return Capabilities(
            devices=frozenset({"cpu"}),
            dtypes=frozenset({torch.float32, torch.bfloat16, torch.float16}),
            head_dims=frozenset(range(8, MAX_HEAD_DIM + 1, 8)),
            block_sizes=frozenset(range(8, MAX_BLOCK_SIZE + 1, 8)),
            kv_dtypes=frozenset({torch.int8}),
            window=True,
            soft_cap=True,
            sinks=True,
            chunk=True,
            latent=True,
            context_parts=True,
            invariant=True,
        )

    @classmethod
    def unavailable(cls, cache_dir: Path | None = None) -> str | None:
        cache_dir = cache_dir or default_cache_dir()
        if find_compiler() is None and find_cached(cache_dir) is None:
            return f"no C++ compiler (g++, c++, clang++) on PATH, and no built kernels under {cache_dir}"
        return None

    def bind(self, spec: AttentionSpec) -> None:
        """Raises RuntimeError: an int8 cache serves bfloat16 queries only."""
        if spec.kv_dtype == torch.int8 and spec.dtype != torch.bfloat16:
            raise RuntimeError(f"CpuBackend: an int8 KV cache serves torch.bfloat16 queries, not {spec.dtype}")
        self._kv_dtype, self._invariant = spec.kv_dtype, spec.invariant

    def prepare(self, cache_dir: Path | None = None) -> None:
        """Builds (once per machine) and loads the kernels. Raises BuildError; RuntimeError if the CPU lacks `isa`."""
        cache_dir = cache_dir or default_cache_dir()
        ops, _ = load_library(build(cache_dir, every_isa=self._isa != 0), cache_dir)
        mask = ops.supported_isas()
        self._supported = tuple(isa for i, isa in enumerate(ISAS) if mask >> i & 1)
        if self._isa and ISAS[self._isa] not in self._supported:
            have = ", ".join(self._supported)
            raise RuntimeError(f"CpuBackend: this CPU (or compiler) has {have}, not {ISAS[self._isa]}")
        if self._invariant and self._isa in (0, ISAS.index("amx")):  # tiles serve many rows alone, and add otherwise
            self._isa = max(ISAS.index(isa) for isa in self._supported if isa != "amx")
        self._paged_attention = ops.paged_attention.default
        self._write_kv = ops.write_kv.default
        self._copy_blocks = ops.copy_blocks.default
        self._describe_plan = ops.describe_plan.default
        self._new_step = ops.new_step.default
        self._native_attention = ops.native_attention.default
        self._merge_parts = ops.merge_parts.default
        self._head_product = ops.head_product.default
        self._latent_kernels = LatentKernels(
            self._attend,
            self.write_kv,
            self._multiply_heads,
            self.kv_cache_shape,
            self._new_step,
            absorbs_all=self._invariant,
        )
        self._native_layer = ops.native_layer.default
        self._native_step = ops.native_step.default

    @property
    def supported_isas(self) -> tuple[Isa, ...]:
        """Those that were compiled and that this CPU runs, narrowest first; empty before `prepare`."""
        return self._supported

    def kv_cache_shape(self, num_blocks: int, block_size: int, num_kv_heads: int, head_dim: int) -> tuple[int, ...]:
        """[num_blocks, 2, num_kv_heads, block_size, head_dim rounded up to 16]; kernels order a block's inside. int8:
        the last dimension is 4 longer, the bytes of a token's scale."""
        scale_bytes = 4 if self._kv_dtype == torch.int8 else 0
        return (num_blocks, 2, num_kv_heads, block_size, (head_dim + 15) // 16 * 16 + scale_bytes)

    def latent_cache_shape(self, num_blocks: int, block_size: int, row_size: int) -> tuple[int, ...]:
        """[num_blocks, 1, 1, block_size, row_size rounded up to 16]. Raises RuntimeError: there are no such kernels."""
        if row_size % 8 or row_size > MAX_HEAD_DIM:
            raise RuntimeError(
                f"CpuBackend: rows of latents (kv_lora_rank + qk_rope_head_dim) of {row_size}: they must be a multiple "
                f"of 8 of at most {MAX_HEAD_DIM}"
            )
        return (num_blocks, 1, 1, block_size, (row_size + 15) // 16 * 16)

    def build_metadata(self, batch: AttentionBatch) -> CpuMetadata:
        return CpuMetadata(
            batch.query_start_loc,
            batch.seq_lens,
            batch.block_tables,
            batch.slot_mapping,
            batch.num_seqs,
            batch.num_tokens,
            batch.context,
            self._new_step(),
        )

    def forward(
        self,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        out: torch.Tensor,
        kv_cache: torch.Tensor,
        layer: AttentionLayer,
        metadata: object,
    ) -> None:
        assert isinstance(metadata, CpuMetadata)
        if layer.latent is not None:
            attend_to_latents(self._latent_kernels, q, k, out, kv_cache, layer, layer.latent, metadata)
        else:
            self._attend(q, k, v, out, kv_cache, layer, metadata)

    def _attend(
        self,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        out: torch.Tensor,
        kv_cache: torch.Tensor,
        layer: AttentionLayer,
        metadata: CpuMetadata,
    ) -> None:
        self._paged_attention(
            q,
            k,
            v,
            out,
            kv_cache,
            metadata.query_start_loc,
            metadata.seq_lens,
            metadata.block_tables,
            metadata.slot_mapping,
            metadata.num_seqs,
            metadata.num_tokens,
            layer.scale,
            layer.signed_window,
            layer.soft_cap or 0.0,
            layer.sinks,
            layer.shares is None,
            self._isa,
            metadata.step,
            metadata.context.size,
            metadata.context.rank,
        )

    def _multiply_heads(self, x: torch.Tensor, weight: torch.Tensor, out: torch.Tensor, transposed: bool) -> None:
        self._head_product(x, weight, out, transposed, self._isa)

    def workspace_bytes(self, max_num_seqs: int, layers: Sequence[AttentionLayer], num_groups: int = 1) -> int:
        """Keys and values that are made of latents, and their pages."""
        sizes = (layer.latent.weight.element_size() for layer in layers if layer.latent is not None)
        return 4 * MADE_VALUES * max(sizes, default=0)

    def merge_parts(self, found: torch.Tensor, out: torch.Tensor, sinks: torch.Tensor | None) -> None:
        self._merge_parts(found, sinks, out, self._isa)

    def native_layer(
        self, layer: AttentionLayer, kv_cache: torch.Tensor, dtype: torch.dtype, heads: ContextHeads | None = None
    ) -> NativeLayer | None:
        """None unless `dtype` is bfloat16, and for a layer that shares another's keys and values, or keeps latents."""
        if dtype != torch.bfloat16 or layer.shares is not None or layer.latent is not None:
            return None
        window, soft_cap = layer.signed_window, layer.soft_cap or 0.0
        ranks = [] if heads is None else [*heads.group, heads.rank, *heads.queries, *heads.keys]
        described, scratch_bytes = self._native_layer(
            kv_cache, layer.num_heads, layer.head_dim, layer.scale, window, soft_cap, layer.sinks, self._isa, ranks
        )
        if layer.num_kv_heads != kv_cache.shape[2]:  # forward sees it in k and v
            raise RuntimeError(f"attention: k and v must have the cache's {kv_cache.shape[2]} heads")
        return NativeLayer(self._native_attention(), described, scratch_bytes=scratch_bytes)

    def native_step(self, metadata: object) -> torch.Tensor:
        assert isinstance(metadata, CpuMetadata)
        return self._native_step(
            metadata.query_start_loc,
            metadata.seq_lens,
            metadata.block_tables,
            metadata.slot_mapping,
            metadata.num_seqs,
            metadata.num_tokens,
            metadata.step,
            metadata.context.size,
            metadata.context.rank,
        )

    def summarise_plan(self, kv_cache: torch.Tensor, layer: AttentionLayer, metadata: CpuMetadata) -> PlanSummary:
        """What `forward` would do; computes nothing."""
        return PlanSummary(
            *self._describe_plan(
                kv_cache,
                metadata.query_start_loc,
                metadata.seq_lens,
                metadata.block_tables,
                metadata.num_seqs,
                layer.num_heads // layer.num_kv_heads,
                layer.signed_window,
                self._isa,
            )
        )

    def write_kv(
        self,
        k: torch.Tensor,
        v: torch.Tensor,
        kv_cache: torch.Tensor,
        slot_mapping: torch.Tensor,
        k_scale: float = 1.0,
        v_scale: float = 1.0,
    ) -> None:
        self._write_kv(k, v, kv_cache, slot_mapping)

    def copy_blocks(self, kv_caches: Sequence[torch.Tensor], pairs: Sequence[tuple[int, int]]) -> None:
        if pairs:
            self._copy_blocks(list(kv_caches), list(kv_caches), torch.tensor(pairs, dtype=torch.int64))

    def swap_blocks(
        self, sources: Sequence[torch.Tensor], destinations: Sequence[torch.Tensor], pairs: Sequence[tuple[int, int]]
    ) -> None:
        if pairs:
            self._copy_blocks(list(sources), list(destinations), torch.tensor(pairs, dtype=torch.int64))
