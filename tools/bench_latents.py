"""Measures latent attention on a CPU against this machine's ceilings: reading the rows (GB/s beside a plain sum over a
buffer of the same size) and multiplying (GFLOP/s beside the library's float32 matmul, in alternation).

Shapes are DeepSeek-V2-Lite's and GLM-4.7-Flash's: 16 or 20 heads over rows of 512 + 64 numbers. "attention" is the call
over pages alone, with queries that have taken the keys' matrix in; "layer" is all of it, by the way that the backend
chooses. JSON comes last.

    python tools/bench_latents.py [--threads N] [--seconds S] [--isa ISA]
"""

from __future__ import annotations

import argparse
import json
from dataclasses import dataclass

import torch
from bench_attention import BLOCK, Step, best_of, print_table, reader

from attention_backends.cpu import ISAS, CpuBackend
from attention_backends.interface import AttentionLayer, AttentionSpec, Latent

RANK, COMMON = 512, 64


@dataclass(frozen=True)
class Shape:
    name: str
    heads: int
    made: int
    value_dim: int


SHAPES = (Shape("DeepSeek-V2-Lite", 16, 128, 128), Shape("GLM-4.7-Flash", 20, 192, 256))
Row = dict[str, object]


class LatentStep:
    """A step of sequences of one length, over as many layers as together are larger than what CPU caches hold."""

    def __init__(self, backend: CpuBackend, shape: Shape, batch: int, queries: int, length: int) -> None:
        self.backend = backend
        self.bytes = batch * length * (RANK + COMMON) * 2
        self.copies = max(1, min(30, (1 << 29) // self.bytes))
        step = Step((shape.heads, 1, RANK + COMMON), queries, length, batch)
        self.batch = step.attention_batch()
        blocks = int(self.batch.block_tables.max()) + 1
        sizes = backend.latent_cache_shape(blocks, BLOCK, RANK + COMMON)
        self.caches = [torch.randn(sizes).bfloat16() for _ in range(self.copies)]
        total = batch * queries
        self.q = torch.randn(total, shape.heads, shape.made + COMMON).bfloat16()
        self.absorbed = torch.randn(total, shape.heads, RANK + COMMON).bfloat16()
        self.rows = torch.randn(total, 1, RANK + COMMON).bfloat16()
        self.out = torch.empty(total, shape.heads, shape.value_dim, dtype=torch.bfloat16)
        self.found = torch.empty_like(self.absorbed)
        scale = (shape.made + COMMON) ** -0.5
        matrices = [
            (torch.randn(shape.heads * (shape.made + shape.value_dim), RANK) * RANK**-0.5).bfloat16()
            for _ in range(self.copies)
        ]
        self.plain = AttentionLayer(shape.heads, 1, RANK + COMMON, scale)
        self.layers = [
            AttentionLayer(shape.heads, 1, RANK + COMMON, scale, latent=Latent(matrix, shape.value_dim))
            for matrix in matrices
        ]
        self.metadata = backend.build_metadata(self.batch)
        pairs = batch * (queries * length - queries * (queries - 1) // 2)
        self.flops = 2 * shape.heads * (2 * RANK + COMMON) * pairs

    def attention(self, i: int) -> None:
        cache = self.caches[i % self.copies]
        self.backend.forward(self.absorbed, self.rows, self.rows, self.found, cache, self.plain, self.metadata)

    def layer(self, i: int) -> None:
        at = i % self.copies
        self.backend.forward(self.q, self.rows, self.rows, self.out, self.caches[at], self.layers[at], self.metadata)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--seconds", type=float, default=0.3, help="time for each figure")
    parser.add_argument("--isa", choices=ISAS, default="auto")
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    backend = CpuBackend(options.isa)
    backend.bind(AttentionSpec(torch.device("cpu"), torch.bfloat16, torch.bfloat16, ()))
    backend.prepare()
    a, b = torch.randn(2, 1024, 1024)
    rows: list[Row] = []
    with torch.inference_mode():
        for shape in SHAPES:
            for batch, queries, length in ((1, 1, 4096), (8, 1, 4096), (64, 1, 1024), (1, 512, 512), (1, 512, 4096)):
                step = LatentStep(backend, shape, batch, queries, length)
                read = reader(step.bytes, step.copies)
                calls = [step.attention, step.layer, read, lambda _: a @ b]
                own, layer, reading, product = best_of(calls, options.seconds)
                rows.append(
                    {
                        "shape": shape.name,
                        "batch": batch,
                        "queries": queries,
                        "length": length,
                        "attention us": round(own * 1e6, 1),
                        "layer us": round(layer * 1e6, 1),
                        "GB/s": round(step.bytes / own / 1e9, 2),
                        "read GB/s": round(step.bytes / reading / 1e9, 2),
                        "share of reading": round(reading / own, 3),
                        "GFLOP/s": round(step.flops / own / 1e9, 1),
                        "matmul GFLOP/s": round(2 * 1024**3 / product / 1e9, 1),
                        "share of matmul": round(step.flops / own * product / (2 * 1024**3), 3),
                    }
                )
    print_table(f"latent attention, threads {options.threads}, isa {options.isa}", rows)
    print(json.dumps(rows))


if __name__ == "__main__":
    main()
