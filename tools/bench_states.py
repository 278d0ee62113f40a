"""Measures layers that keep matrices as states on a CPU against this machine's ceilings, in alternation with them.

Decode reads and writes each sequence's state once: bytes a second beside a copy of as many bytes. A prompt is bound by
arithmetic in float32: operations a second beside the library's float32 matmul. "layer" is all between a layer's first
and its last matrix: convolution, gates, recurrence, norm. States lie in the pages of a cache, as in an engine. Figures
are the best of many repeats. JSON comes last.

    python tools/bench_states.py [--threads N] [--seconds S] [--isa ISA]
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import torch
from bench_attention import best_of, print_table

from attention_backends.native_build import ISAS
from attention_backends.toolchain import default_cache_dir
from engine.cpu_kernels.linear import LinearOps, load
from engine.layer_groups import State, state_starts
from engine.models.delta_net import DeltaNet
from engine.models.mamba import Mamba
from engine.models.mixers import DeltaSpec, MambaSpec
from engine.runner.state_caches import StateCaches
from engine.step import NO_WRITES, Rows, ScheduledRow, Write, Writes

SHAPES: dict[str, DeltaSpec | MambaSpec] = {
    "Qwen3.5 0.8B": DeltaSpec(key_heads=16, value_heads=16, key_dim=128, value_dim=128, taps=4),
    "Qwen3-Next": DeltaSpec(key_heads=16, value_heads=32, key_dim=128, value_dim=128, taps=4),
    "Kimi Linear": DeltaSpec(key_heads=32, value_heads=32, key_dim=128, value_dim=128, taps=4, rank=128),
    "Granite 4 tiny": MambaSpec(heads=48, head_dim=64, groups=1, state_size=128, taps=4),
    "Nemotron-H 8B": MambaSpec(heads=128, head_dim=64, groups=8, state_size=128, taps=4),
}
BLOCK, CACHES, PAGE = 16, 4, 32 << 10
"""tokens; caches, and bytes of a page in each: 2 heads of 256 in bfloat16"""
LEAST_BYTES, MOST_LAYERS = 1 << 29, 30
"""of all layers' states: more than CPU caches hold"""
Row = dict[str, object]


class Layers:
    """As many alike as keep more than CPU caches hold, of `batch` sequences, each in the middle of a block."""

    def __init__(self, ops: LinearOps, spec: DeltaSpec | MambaSpec, batch: int, isa: int) -> None:
        cpu, dtype = torch.device("cpu"), torch.bfloat16
        self.layer = DeltaNet(spec, 1e-6, dtype, cpu) if isinstance(spec, DeltaSpec) else Mamba(spec, dtype, cpu)
        with torch.no_grad():
            for weights in self.layer.parameters():
                weights.copy_(torch.randn(weights.shape) / 4)
        self.layer.compute_by(ops, isa)
        self.state_bytes = spec.state_bytes(dtype.itemsize)
        self.count = max(1, min(MOST_LAYERS, LEAST_BYTES // (self.state_bytes * batch)))
        starts = state_starts([self.state_bytes] * self.count)
        pages = -(-starts[-1] // (CACHES * PAGE))
        self.states = StateCaches([self.layer] * self.count, dtype, State(pages, 1))
        self.states.allocate([torch.zeros(pages * batch, PAGE, dtype=torch.uint8) for _ in range(CACHES)])
        bundles = torch.randperm(pages * batch).view(batch, pages)
        tables = Writes.of(Write(0, row, 0, [first]) for row, first in enumerate(bundles[:, 0].tolist()))
        self.states.place(bundles.tolist(), NO_WRITES, 0)
        self.states.place([], tables, 0)
        self.batch = batch

    def call(self, before: int, count: int) -> Callable[[int], None]:
        """A step in which each sequence has `count` tokens behind so many; calls use one layer after the other."""
        facts: Any = SimpleNamespace(block_size=BLOCK if before else count, block_tables=torch.empty(0))
        x = torch.randn(self.batch * count, self.layer.inputs).bfloat16()
        out = torch.empty(len(x), self.layer.outputs, dtype=x.dtype)
        self.states.begin_step(facts, Rows.of(ScheduledRow(row, before, count, 1) for row in range(self.batch)))
        return lambda i: self.states.mix(x, out, i % self.count)


def copier(size: int, copies: int) -> Callable[[int], object]:
    """A copy of `size` bytes from one buffer to the next, of more than CPU caches hold."""
    buffers = [torch.ones(size // 8, dtype=torch.int64) for _ in range(copies + 1)]
    return lambda i: buffers[i % copies + 1].copy_(buffers[i % copies])


def decode(ops: LinearOps, isa: int, seconds: float) -> list[Row]:
    rows: list[Row] = []
    for name, spec in SHAPES.items():
        for batch in (1, 8, 32):
            layers = Layers(ops, spec, batch, isa)
            size = layers.state_bytes * batch
            own, copy = best_of([layers.call(8, 1), copier(size, layers.count)], seconds)
            rows.append(
                {
                    "shape": name,
                    "batch": batch,
                    "MB": round(size / 1e6, 2),
                    "layer us": round(own * 1e6, 1),
                    "GB/s": round(2 * size / own / 1e9, 2),
                    "copy GB/s": round(2 * size / copy / 1e9, 2),
                    "share of copy": round(copy / own, 3),
                }
            )
    return rows


def prompts(ops: LinearOps, isa: int, seconds: float) -> list[Row]:
    rows: list[Row] = []
    a, b = torch.randn(2, 1024, 1024)
    for name, spec in SHAPES.items():
        heads, keys, values = spec.matrices
        of_cell = 7 if isinstance(spec, DeltaSpec) else 5  # decay; what is added; what is read; what was held
        for tokens in (128, 512, 2048):
            layers = Layers(ops, spec, 1, isa)
            own, product = best_of([layers.call(0, tokens), lambda _: a @ b], seconds)
            flops = of_cell * heads * keys * values * tokens
            rows.append(
                {
                    "shape": name,
                    "tokens": tokens,
                    "layer us": round(own * 1e6, 1),
                    "GFLOP/s": round(flops / own / 1e9, 1),
                    "matmul GFLOP/s": round(2 * 1024**3 / product / 1e9, 1),
                    "share of matmul": round(flops / own * product / (2 * 1024**3), 3),
                }
            )
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--seconds", type=float, default=0.5, help="time for each figure")
    parser.add_argument("--isa", choices=["auto", *ISAS], default="auto")
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    ops, isa = load(default_cache_dir(), every_isa=True), ["auto", *ISAS].index(options.isa)
    found: dict[str, list[Row]] = {}
    with torch.inference_mode():
        for title, bench in (("decode", decode), ("prompts", prompts)):
            found[title] = bench(ops, isa, options.seconds)
            print_table(f"{title}, threads {options.threads}, isa {options.isa}", found[title])
    print(json.dumps(found))


if __name__ == "__main__":
    main()
