"""Measures the CPU attention kernels against this machine's ceilings, taken in alternation with them.

Decode is bound by reading KV: GB/s beside a measured read of a buffer of the same size. Prefill is bound by arithmetic:
GFLOP/s beside a measured bf16 matmul (torch's, in a process of its own whose oneDNN is held to the same instruction set
as the kernels). A shared prefix is set beside the same lengths with nothing in common. The first table is what a call
costs that has little to compute, with its metadata. Figures are the best of many repeats. JSON comes last.

    python tools/bench_attention.py [--threads N] [--seconds S] [--isa ISA] [--only decode,prefill,...]
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import torch

from attention_backends.cpu import ISAS, CpuBackend, Isa
from attention_backends.interface import AttentionBatch, AttentionLayer, AttentionSpec

BLOCK = 16
SMOLLM2, WIDE = (9, 3, 64), (32, 8, 128)
NAMES = {SMOLLM2: "9/3x64 (SmolLM2)", WIDE: "32/8x128"}
MAX_CACHE_BYTES = 1 << 30
SECTIONS = ("call", "decode", "shared", "prefill")
# What oneDNN may use beside kernels of an ISA; "auto" and "amx": all that the CPU has.
ONEDNN_ISA = {"avx512bf16": "AVX512_CORE_BF16", "avx512": "AVX512_CORE", "avx2": "AVX2", "portable": "SSE41"}
MATMUL = """
import time, torch
torch.set_num_threads({threads})
a, b = torch.randn(2, 1024, 1024).bfloat16()
best = float("inf")
for _ in iter(input, "stop"):
    end = time.perf_counter() + {seconds}
    while time.perf_counter() < end:
        start = time.perf_counter()
        a @ b
        best = min(best, time.perf_counter() - start)
    print(2 * 1024**3 / best / 1e9, flush=True)
"""

Row = dict[str, object]


@dataclass(frozen=True)
class Bench:
    backends: dict[torch.dtype, CpuBackend]
    """by type of the cache"""
    seconds: float
    matmul: Callable[[], float]
    """GFLOP/s of a 1024^3 bf16 matmul: the best so far"""


@dataclass(frozen=True)
class Step:
    """A step of `batch` sequences of the same length, which have their first `shared` tokens in common."""

    shape: tuple[int, int, int]
    queries: int
    length: int
    batch: int = 1
    shared: int = 0
    kv_dtype: torch.dtype = torch.bfloat16

    @property
    def kv_bytes(self) -> int:
        """of one layer, as the kernels see it: each sequence's own"""
        _, heads, dim = self.shape
        token = dim * 2 if self.kv_dtype == torch.bfloat16 else dim + 4
        return 2 * heads * token * self.length * self.batch

    @property
    def copies(self) -> int:
        """layers whose caches together are larger than what CPU caches hold, or as many as a model has"""
        return max(1, min(30, MAX_CACHE_BYTES // self.kv_bytes))

    def tables(self) -> torch.Tensor:
        columns, common = -(-self.length // BLOCK), self.shared // BLOCK
        own = columns - common
        table = torch.randperm(common + own * self.batch, dtype=torch.int32)
        return torch.cat((table[:common].repeat(self.batch, 1), table[common:].view(self.batch, own)), dim=1)

    def attention_batch(self) -> AttentionBatch:
        tables = self.tables()
        last = torch.arange(self.length - self.queries, self.length)
        return AttentionBatch(
            num_seqs=self.batch,
            num_tokens=self.batch * self.queries,
            max_query_len=self.queries,
            max_seq_len=self.length,
            query_start_loc=torch.arange(self.batch + 1, dtype=torch.int32) * self.queries,
            seq_lens=torch.full((self.batch,), self.length, dtype=torch.int32),
            block_tables=tables,
            slot_mapping=(tables.long()[:, last // BLOCK] * BLOCK + last % BLOCK).flatten(),
            block_size=BLOCK,
        )

    def call(self, bench: Bench, new_metadata: bool = False) -> Callable[[int], None]:
        """Runs one layer's attention; successive calls use successive layers' caches, as a model does."""
        backend = bench.backends[self.kv_dtype]
        num_heads, num_kv_heads, head_dim = self.shape
        batch = self.attention_batch()
        blocks = int(batch.block_tables.max()) + 1
        shape = backend.kv_cache_shape(blocks, BLOCK, num_kv_heads, head_dim)
        caches = [torch.zeros(shape, dtype=self.kv_dtype) for _ in range(self.copies)]
        keys, values = torch.randn(2, blocks * BLOCK, num_kv_heads, head_dim).bfloat16()
        for cache in caches:
            backend.write_kv(keys, values, cache, torch.arange(blocks * BLOCK))
        total = self.batch * self.queries
        q, k, v = (torch.randn(total, n, head_dim).bfloat16() for n in (num_heads, num_kv_heads, num_kv_heads))
        out = torch.empty_like(q)
        layer = AttentionLayer(num_heads, num_kv_heads, head_dim, head_dim**-0.5)
        metadata = backend.build_metadata(batch)

        def run(i: int) -> None:
            nonlocal metadata
            if new_metadata or i % self.copies == 0:  # as at a step's first layer
                metadata = backend.build_metadata(batch)
            backend.forward(q, k, v, out, caches[i % self.copies], layer, metadata)

        return run


def best_of(calls: Sequence[Callable[[int], object]], seconds: float) -> list[float]:
    """The best time of each call, in alternation; calls cycle through copies by index, so that nothing stays warm."""
    best = [float("inf")] * len(calls)
    index, end = 0, time.perf_counter() + seconds * len(calls)
    while index < 5 or time.perf_counter() < end:
        for i, call in enumerate(calls):
            start = time.perf_counter()
            call(index)
            best[i] = min(best[i], time.perf_counter() - start)
        index += 1
    return best


def reader(size: int, copies: int) -> Callable[[int], object]:
    """A plain sum over int64 of `size` bytes, cycling through `copies` buffers."""
    buffers = [torch.ones(max(1, size // 8), dtype=torch.int64) for _ in range(copies)]
    return lambda i: buffers[i % copies].sum()


def bench_call(bench: Bench) -> list[Row]:
    rows: list[Row] = []
    for length in (1, 16, 64, 256, 600):
        step = Step(SMOLLM2, 1, length)
        layer, first = best_of([step.call(bench), step.call(bench, new_metadata=True)], bench.seconds)
        rows.append({"length": length, "us": round(layer * 1e6, 2), "us with metadata": round(first * 1e6, 2)})
    return rows


def bench_decode(bench: Bench) -> list[Row]:
    rows: list[Row] = []
    for shape in (SMOLLM2, WIDE):
        for batch, length in ((1, 512), (1, 8192), (8, 512), (64, 600), (64, 4096)):
            for dtype in bench.backends:
                step = Step(shape, 1, length, batch, kv_dtype=dtype)
                if step.kv_bytes > MAX_CACHE_BYTES:
                    continue
                own, read = best_of([step.call(bench), reader(step.kv_bytes, step.copies)], bench.seconds)
                rows.append(
                    {
                        "shape": NAMES[shape],
                        "kv": str(dtype).removeprefix("torch."),
                        "batch": batch,
                        "length": length,
                        "us": round(own * 1e6, 1),
                        "GB/s": round(step.kv_bytes / own / 1e9, 2),
                        "read GB/s": round(step.kv_bytes / read / 1e9, 2),
                        "share": round(read / own, 3),
                    }
                )
    return rows


def bench_shared(bench: Bench) -> list[Row]:
    rows: list[Row] = []
    for shape in (SMOLLM2, WIDE):
        for batch, shared, own in ((64, 512, 32), (8, 2048, 100), (2, 4096, 100)):
            for dtype in bench.backends:
                step = Step(shape, 1, shared + own, batch, shared, dtype)
                apart = Step(shape, 1, shared + own, batch, 0, dtype)
                together, alone = best_of([step.call(bench), apart.call(bench)], bench.seconds)
                rows.append(
                    {
                        "shape": NAMES[shape],
                        "kv": str(dtype).removeprefix("torch."),
                        "batch": batch,
                        "shared + own": f"{shared} + {own}",
                        "us": round(together * 1e6, 1),
                        "us if not shared": round(alone * 1e6, 1),
                        "speed-up": round(alone / together, 2),
                    }
                )
    return rows


def bench_prefill(bench: Bench) -> list[Row]:
    rows: list[Row] = []
    for shape in (SMOLLM2, WIDE):
        for queries, length in ((128, 128), (512, 512), (2048, 2048), (512, 4096)):
            pairs = queries * length - queries * (queries - 1) // 2
            flops = 4 * shape[0] * shape[2] * pairs
            for dtype in bench.backends:
                bench.matmul()
                (own,) = best_of([Step(shape, queries, length, kv_dtype=dtype).call(bench)], bench.seconds)
                ceiling = bench.matmul()
                rows.append(
                    {
                        "shape": NAMES[shape],
                        "kv": str(dtype).removeprefix("torch."),
                        "queries": queries,
                        "length": length,
                        "us": round(own * 1e6, 1),
                        "GFLOP/s": round(flops / own / 1e9, 1),
                        "matmul GFLOP/s": round(ceiling, 1),
                        "share": round(flops / own / 1e9 / ceiling, 3),
                    }
                )
    return rows


@contextmanager
def matmul_process(isa: Isa, threads: int, seconds: float) -> Iterator[Callable[[], float]]:
    """A process that multiplies when asked, and says its best rate so far."""
    limit = {"ONEDNN_MAX_CPU_ISA": ONEDNN_ISA[isa]} if isa in ONEDNN_ISA else {}
    process = subprocess.Popen(
        [sys.executable, "-c", MATMUL.format(threads=threads, seconds=seconds)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        env={**os.environ, **limit},
    )

    def ask() -> float:
        assert process.stdin is not None
        assert process.stdout is not None
        process.stdin.write("go\n")
        process.stdin.flush()
        return float(process.stdout.readline())

    try:
        yield ask
    finally:
        process.communicate("stop\n")


def print_table(title: str, rows: list[Row]) -> None:
    widths = [max(len(key), *(len(str(row[key])) for row in rows)) for key in rows[0]]
    print(f"\n{title}")
    print("  ".join(key.rjust(width) for key, width in zip(rows[0], widths, strict=True)))
    for row in rows:
        print("  ".join(str(value).rjust(width) for value, width in zip(row.values(), widths, strict=True)), flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--seconds", type=float, default=0.2, help="time for each figure")
    parser.add_argument("--isa", choices=ISAS, default="auto")
    parser.add_argument("--only", default=",".join(SECTIONS), help=f"of {','.join(SECTIONS)}")
    parser.add_argument("--cache-dir", type=Path, default=None)
    options = parser.parse_args()
    asked = options.only.split(",")
    if unknown := set(asked) - set(SECTIONS):
        parser.error(f"--only: {', '.join(sorted(unknown))} is not one of {', '.join(SECTIONS)}")
    torch.set_num_threads(options.threads)
    backends: dict[torch.dtype, CpuBackend] = {}
    for dtype in (torch.bfloat16, torch.int8):
        backends[dtype] = CpuBackend(options.isa)
        backends[dtype].bind(AttentionSpec(torch.device("cpu"), torch.bfloat16, dtype, (0,)))
        backends[dtype].prepare(options.cache_dir)
    sections = {"call": bench_call, "decode": bench_decode, "shared": bench_shared, "prefill": bench_prefill}
    titles = {
        "call": "one sequence, 9/3x64: a layer's call",
        "decode": "decode",
        "shared": "decode with a shared prefix",
        "prefill": "prefill",
    }
    print(f"threads {options.threads}, isa {options.isa}")
    result: dict[str, object] = {"threads": options.threads, "isa": options.isa}
    with torch.inference_mode(), matmul_process(options.isa, options.threads, options.seconds) as matmul:
        bench = Bench(backends, options.seconds, matmul)
        for name in asked:
            rows = sections[name](bench)
            print_table(titles[name], rows)
            result[name] = rows
    print(json.dumps(result))


if __name__ == "__main__":
    main()
