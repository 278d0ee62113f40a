"""Attention kernels beside the ceilings: decode is bound by reading KV (GB/s), prefill by arithmetic (TFLOP/s).

KV is random, pages are in random order, outputs are poisoned first and must be finite afterwards. Successive calls read
successive copies of the cache, together several times the L2.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch

from attention_backends.interface import AttentionBackend, AttentionBatch, AttentionLayer
from gpu.backends import FP8, NATIVE, Backends, spec_of
from gpu.ceilings import copy_gb_per_s, matmul_tflop_per_s
from gpu.context import Context, UnavailableError
from gpu.timing import Timing, time_replays

BLOCK = 16
POOL_BYTES = 36 << 30
MAX_COPIES = 64
L2_MULTIPLE = 4


@dataclass(frozen=True)
class Shape:
    """One layer's step: `batch` sequences of `context` tokens, `queries` of them new."""

    batch: int
    context: int
    queries: int = 1
    num_heads: int = 32
    num_kv_heads: int = 8
    head_dim: int = 128
    kv_dtype: torch.dtype = torch.bfloat16
    block_size: int = BLOCK

    @property
    def columns(self) -> int:
        return -(-self.context // self.block_size)

    @property
    def kv_bytes(self) -> int:
        """that a step must read"""
        return 2 * self.num_kv_heads * self.head_dim * self.kv_dtype.itemsize * self.context * self.batch

    @property
    def cache_elements(self) -> int:
        return 2 * self.num_kv_heads * self.head_dim * self.block_size * self.columns * self.batch

    @property
    def flops(self) -> int:
        pairs = self.queries * self.context - self.queries * (self.queries - 1) // 2
        return 4 * self.num_heads * self.head_dim * pairs * self.batch

    @property
    def label(self) -> dict[str, object]:
        return {
            "heads": f"{self.num_heads}/{self.num_kv_heads}x{self.head_dim}",
            "kv": str(self.kv_dtype).removeprefix("torch."),
            "page": self.block_size,
            "batch": self.batch,
            "queries": self.queries,
            "context": self.context,
        }


DECODE_GRID = [Shape(b, c) for c in (2048, 8192, 32768, 512) for b in (32, 256, 64, 8, 1)]
OTHER_HEADS = [(16, 8, 128), (64, 8, 128), (28, 4, 128), (32, 8, 64), (16, 8, 256), (32, 32, 96)]
DECODE_OTHERS = [Shape(64, 8192, 1, *heads) for heads in OTHER_HEADS] + [
    Shape(64, 8192, kv_dtype=FP8),
    Shape(64, 8192, block_size=64),
    Shape(64, 8192, queries=4),
]
PREFILL_GRID = [Shape(1, n, n) for n in (8192, 1024, 2048, 4096, 16384, 32768)] + [
    Shape(8, 1024, 1024),
    Shape(1, 8192, 512),
    Shape(1, 8192, 8192, 32, 8, 64),
]
DRY_DECODE = [Shape(2, 40, 1, 4, 2, 64), Shape(1, 17, 1, 4, 2, 64)]
DRY_PREFILL = [Shape(1, 33, 33, 4, 2, 64)]


class Step:
    """One layer's attention over rotating caches; `self(i)` runs it once."""

    def __init__(self, backend: AttentionBackend, shape: Shape, pool: torch.Tensor, l2_bytes: int) -> None:
        device = pool.device
        size_bytes = shape.cache_elements * shape.kv_dtype.itemsize
        wanted = -(-L2_MULTIPLE * l2_bytes // size_bytes)
        self.copies = max(1, min(wanted, MAX_COPIES, pool.nbytes // size_bytes))
        cache_shape = backend.kv_cache_shape(
            shape.columns * shape.batch, shape.block_size, shape.num_kv_heads, shape.head_dim
        )
        flat = pool.view(torch.uint8)
        pages = (flat[i * size_bytes : (i + 1) * size_bytes] for i in range(self.copies))
        self.caches = [page.view(shape.kv_dtype).view(cache_shape) for page in pages]
        tokens = shape.batch * shape.queries
        heads = (shape.num_heads, shape.num_kv_heads, shape.num_kv_heads)
        self.q, self.k, self.v = (
            torch.randn(tokens, n, shape.head_dim, device=device).to(torch.bfloat16) for n in heads
        )
        self.out = torch.full_like(self.q, float("nan"))
        self.layer = AttentionLayer(shape.num_heads, shape.num_kv_heads, shape.head_dim, shape.head_dim**-0.5)
        self.backend = backend
        self.metadata = backend.build_metadata(batch_of(shape, device))

    def __call__(self, i: int) -> None:
        cache = self.caches[i % self.copies]
        self.backend.forward(self.q, self.k, self.v, self.out, cache, self.layer, self.metadata)


def batch_of(shape: Shape, device: torch.device) -> AttentionBatch:
    tables = torch.randperm(shape.columns * shape.batch, dtype=torch.int32).view(shape.batch, shape.columns)
    new = torch.arange(shape.context - shape.queries, shape.context)
    slots = (tables.long()[:, new // shape.block_size] * shape.block_size + new % shape.block_size).flatten()
    return AttentionBatch(
        num_seqs=shape.batch,
        num_tokens=shape.batch * shape.queries,
        max_query_len=shape.queries,
        max_seq_len=shape.context,
        query_start_loc=(torch.arange(shape.batch + 1, dtype=torch.int32) * shape.queries).to(device),
        seq_lens=torch.full((shape.batch,), shape.context, dtype=torch.int32).to(device),
        block_tables=tables.to(device),
        slot_mapping=slots.to(device),
        block_size=shape.block_size,
        num_decodes=shape.batch if shape.queries == 1 else 0,
        query_lens_host=[shape.queries] * shape.batch,
        seq_lens_host=[shape.context] * shape.batch,
    )


def measure(context: Context, backend: AttentionBackend, shape: Shape, pool: torch.Tensor) -> Timing:
    step = Step(backend, shape, pool, context.device.l2_bytes)
    step(0)
    if not step.out.isfinite().all():
        raise RuntimeError(f"{backend.name}: {shape.label} left elements unwritten or not finite")
    return time_replays(context.device, step, step.copies)


def make_pool(context: Context) -> torch.Tensor:
    """Random bf16 for every cache of the run: allocating and filling them one by one would take longer than timing."""
    count = 1 << 20 if context.dry else POOL_BYTES // 2
    pool = torch.empty(count, dtype=torch.bfloat16, device=context.device.torch_device)
    return pool.normal_()


def fp8_pool(pool: torch.Tensor) -> torch.Tensor:
    """Random finite fp8 in the first part of the pool's size: bf16 bits would hold fp8 NaN."""
    count = min(pool.nbytes, 4 << 30)
    return torch.randint(0, 0x70, (count,), dtype=torch.uint8, device=pool.device)


def bench(context: Context, kind: str, shapes: Sequence[Shape], names: Sequence[str]) -> None:
    """Every shape with every backend, the most important first, each a row of figure `kind`."""
    copy, matmul = copy_gb_per_s(context.device), matmul_tflop_per_s(context.device)
    context.figure("ceilings", {"copy_gb_per_s": round(copy, 1), "matmul_tflop_per_s": round(matmul, 1)})
    families: dict[str, Backends] = {}
    for name in names:
        try:
            families[name] = Backends(context, name)
        except UnavailableError as error:
            context.skipped(f"{kind} by {name}", str(error))
    if not families:
        raise UnavailableError("none of the backends can run here")
    pool = make_pool(context)
    for shape in shapes:
        for name, backends in families.items():
            label = f"{kind} by {name}: {shape.label}"
            if context.out_of_time(label, 3.0):
                continue
            if not _serves(backends, shape):
                context.skipped(label, "not among its capabilities")
                continue
            try:
                backend = backends.get(spec_of(context, shape.head_dim, kv_dtype=shape.kv_dtype))
                timing = measure(context, backend, shape, fp8_pool(pool) if shape.kv_dtype == FP8 else pool)
            except (RuntimeError, ValueError) as error:
                context.check(label, f"{type(error).__name__}: {error}")
                continue
            seconds = timing.median_us / 1e6
            row = {"backend": name, **shape.label, "us": round(timing.median_us, 2), "spread": round(timing.spread, 3)}
            row |= {"gb_per_s": round(shape.kv_bytes / seconds / 1e9, 1)}
            row |= {"copy_share": round(shape.kv_bytes / seconds / 1e9 / copy, 4)}
            row |= {"tflop_per_s": round(shape.flops / seconds / 1e12, 2)}
            row |= {"matmul_share": round(shape.flops / seconds / 1e12 / matmul, 4)}
            context.figure(kind, row)


def _serves(backend: Backends, shape: Shape) -> bool:
    able = backend.capabilities()
    return (
        (able.head_dims is None or shape.head_dim in able.head_dims)
        and (able.block_sizes is None or shape.block_size in able.block_sizes)
        and (shape.kv_dtype == torch.bfloat16 or shape.kv_dtype in able.kv_dtypes)
    )


def run_decode(context: Context) -> None:
    """Part `decode-kernels`."""
    bench(context, "decode", DRY_DECODE if context.dry else DECODE_GRID, ["cuda"])


def run_prefill(context: Context) -> None:
    """Part `prefill-kernels`."""
    bench(context, "prefill", DRY_PREFILL if context.dry else PREFILL_GRID, ["cuda"])


def run_flashinfer(context: Context) -> None:
    """Part `flashinfer-kernels`: the same grids."""
    bench(context, "prefill", DRY_PREFILL if context.dry else PREFILL_GRID, ["flashinfer"])
    bench(context, "decode", DRY_DECODE if context.dry else DECODE_GRID, ["flashinfer"])


def run_other_shapes(context: Context) -> None:
    """Part `other-shapes`: further heads, fp8 caches, larger pages, several queries per sequence."""
    others = [replace(DRY_DECODE[0], kv_dtype=FP8)] if context.dry else DECODE_OTHERS
    bench(context, "decode_other_shapes", others, NATIVE)
