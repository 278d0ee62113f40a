"""Measures the CPU attention kernels against this machine's ceilings, taken in the same run.

Decode is bound by reading KV: GB/s beside a measured read of a buffer of the same size. Prefill is bound by arithmetic:
GFLOP/s beside a measured bf16 matmul (torch's: with AMX where the CPU has it). The first line gives the cost of a call
that has next to nothing to compute. JSON comes last.

    python tools/bench_attention.py [--threads N] [--seconds S] [--isa ISA]
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Callable
from pathlib import Path

import torch

from attention_backends.cpu import ISAS, CpuBackend
from attention_backends.interface import AttentionBatch, AttentionLayer

BLOCK = 16
SHAPES = {"9/3x64 (SmolLM2)": (9, 3, 64), "32/8x128": (32, 8, 128)}
MAX_CACHE_BYTES = 1 << 31


def seconds_per_call(call: Callable[[int], object], budget_s: float) -> float:
    """Median over calls within `budget_s`; the calls cycle through copies by index so that caches do not stay warm."""
    call(0)
    samples: list[float] = []
    end = time.perf_counter() + budget_s
    while len(samples) < 5 or time.perf_counter() < end:
        start = time.perf_counter()
        call(len(samples))
        samples.append(time.perf_counter() - start)
    return statistics.median(samples)


def read_bandwidth(num_bytes: int, copies: int, budget_s: float) -> float:
    """GB/s of a plain sum over int64 of `num_bytes`, cycling through `copies` buffers."""
    buffers = [torch.ones(max(1, num_bytes // 8), dtype=torch.int64) for _ in range(copies)]
    return num_bytes / seconds_per_call(lambda i: buffers[i % copies].sum(), budget_s) / 1e9


def matmul_ceiling(budget_s: float) -> float:
    """GFLOP/s of a 1024^3 bf16 matmul."""
    a, b = torch.randn(2, 1024, 1024).bfloat16()
    return 2 * 1024**3 / seconds_per_call(lambda _: a @ b, budget_s) / 1e9


def make_step(
    backend: CpuBackend, shape: tuple[int, int, int], queries: int, length: int, batch: int, layers: int
) -> Callable[[int], None]:
    """A call that runs one layer's attention; successive calls use successive layers' caches, as a model does."""
    num_heads, num_kv_heads, head_dim = shape
    columns = -(-length // BLOCK)
    tables = torch.randperm(columns * batch, dtype=torch.int32).view(batch, columns)
    last = torch.arange(length - queries, length)
    slots = (tables.long()[:, last // BLOCK] * BLOCK + last % BLOCK).flatten()
    step = AttentionBatch(
        num_seqs=batch,
        num_tokens=batch * queries,
        max_query_len=queries,
        max_seq_len=length,
        query_start_loc=torch.arange(batch + 1, dtype=torch.int32) * queries,
        seq_lens=torch.full((batch,), length, dtype=torch.int32),
        block_tables=tables,
        slot_mapping=slots,
        block_size=BLOCK,
    )
    cache_shape = backend.kv_cache_shape(columns * batch, BLOCK, num_kv_heads, head_dim)
    caches = [torch.randn(cache_shape, dtype=torch.bfloat16) for _ in range(layers)]
    q, k, v = (torch.randn(batch * queries, n, head_dim).bfloat16() for n in (num_heads, num_kv_heads, num_kv_heads))
    out = torch.empty_like(q)
    layer = AttentionLayer(num_heads, num_kv_heads, head_dim, head_dim**-0.5)
    metadata = backend.build_metadata(step)
    return lambda i: backend.forward(q, k, v, out, caches[i % layers], layer, metadata)


def bench_decode(backend: CpuBackend, budget_s: float) -> list[dict[str, object]]:
    rows: list[dict[str, object]] = []
    for name, shape in SHAPES.items():
        for batch in (1, 8, 64):
            for context in (512, 4096):
                size = 2 * shape[1] * shape[2] * 2 * context * batch
                layers = max(1, min(30, MAX_CACHE_BYTES // size))
                seconds = seconds_per_call(make_step(backend, shape, 1, context, batch, layers), budget_s)
                bandwidth, ceiling = size / seconds / 1e9, read_bandwidth(size, layers, budget_s)
                rows.append(
                    {
                        "shape": name,
                        "batch": batch,
                        "context": context,
                        "microseconds": round(seconds * 1e6, 1),
                        "GB/s": round(bandwidth, 2),
                        "read GB/s": round(ceiling, 2),
                        "share": round(bandwidth / ceiling, 3),
                    }
                )
    return rows


def bench_prefill(backend: CpuBackend, budget_s: float) -> list[dict[str, object]]:
    rows: list[dict[str, object]] = []
    for name, shape in SHAPES.items():
        for queries, context in ((128, 128), (512, 512), (2048, 2048), (512, 4096)):
            pairs = queries * context - queries * (queries - 1) // 2
            flops = 4 * shape[0] * shape[2] * pairs
            seconds = seconds_per_call(make_step(backend, shape, queries, context, 1, 2), budget_s)
            ceiling = matmul_ceiling(budget_s)
            rows.append(
                {
                    "shape": name,
                    "queries": queries,
                    "context": context,
                    "microseconds": round(seconds * 1e6, 1),
                    "GFLOP/s": round(flops / seconds / 1e9, 1),
                    "matmul GFLOP/s": round(ceiling, 1),
                    "share": round(flops / seconds / 1e9 / ceiling, 3),
                }
            )
    return rows


def print_table(title: str, rows: list[dict[str, object]]) -> None:
    widths = [max(len(key), *(len(str(row[key])) for row in rows)) for key in rows[0]]
    print(f"\n{title}")
    print("  ".join(key.rjust(width) for key, width in zip(rows[0], widths, strict=True)))
    for row in rows:
        print("  ".join(str(value).rjust(width) for value, width in zip(row.values(), widths, strict=True)))


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--seconds", type=float, default=0.2, help="time for each figure")
    parser.add_argument("--isa", choices=ISAS, default="auto")
    parser.add_argument("--cache-dir", type=Path, default=None)
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    backend = CpuBackend(options.isa)
    backend.prepare(options.cache_dir)
    with torch.inference_mode():
        call_us = 1e6 * seconds_per_call(make_step(backend, (1, 1, 16), 1, 1, 1, 1), options.seconds)
        decode, prefill = bench_decode(backend, options.seconds), bench_prefill(backend, options.seconds)
    print(f"threads {options.threads}, isa {options.isa}, an empty call {call_us:.1f} us")
    print_table("decode (bf16 KV)", decode)
    print_table("prefill (bf16)", prefill)
    result = {"threads": options.threads, "isa": options.isa, "call_us": call_us, "decode": decode, "prefill": prefill}
    print(json.dumps(result))


if __name__ == "__main__":
    main()
