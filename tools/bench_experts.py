"""How fast is a mixture of experts, beside our dense layers over the same bytes and what the machine can read?

Runs the experts of some layers, each with weights of its own and choices that differ from round to round, one after
another as a step does. Beside them, in alternation: a gated MLP of dense packed layers over the weights of as many
experts, laid end to end as one matrix each, with as many rows as an expert has on average: the same bytes and the same
operations, without sorting, gathering and combining. And how fast the machine reads memory (the best round), which also
empties the caches. Times are medians over the rounds, and so are the ratios to the dense layers' bytes and operations a
second. With one thread they are its time on a core: on a busy machine other processes disturb that less.

    python tools/bench_experts.py [--tokens 1,8,64,512] [--formats BFLOAT16,INT8,Q4_1] [--threads 2] [--rounds 15]
"""

from __future__ import annotations

import argparse
import ctypes
import json
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import torch
from bench_linear import keep_memory

from attention_backends.native_build import ISAS, NativeSources, Unit, build
from attention_backends.toolchain import default_cache_dir
from engine.cpu_kernels import linear
from engine.cpu_kernels.build import CSRC
from engine.cpu_kernels.experts import ExpertWeights, Routing, pack_experts
from engine.cpu_kernels.formats import Format
from engine.cpu_kernels.reading import choose_reading

LAYERS, EXPERTS, TOP_K, HIDDEN, INNER = 8, 32, 4, 576, 384
ROUTES = 8
READ_BYTES = 256 << 20


@dataclass(frozen=True)
class Choices:
    """Of one layer."""

    ids: torch.Tensor
    weights: torch.Tensor
    used: int
    """experts that somebody chose"""


def make_layers(format: Format) -> list[ExpertWeights]:
    return [
        pack_experts(torch.randn(EXPERTS, 2 * INNER, HIDDEN) * 0.05, torch.randn(EXPERTS, HIDDEN, INNER) * 0.05, format)
        for _ in range(LAYERS)
    ]


def make_routes(ops: linear.LinearOps, tokens: int, even: bool) -> list[list[Choices]]:
    """Of every round (in turn) and layer. `even`: experts have as many rows as each other, or one more."""

    def choose() -> Choices:
        ids, weights = ops.route(torch.randn(tokens, EXPERTS), int(Routing.SOFTMAX), TOP_K, True, None, 1, 1, 1.0)
        if even:
            ids = torch.randperm(EXPERTS, dtype=torch.int32).repeat(-(-ids.numel() // EXPERTS))[: ids.numel()]
            ids = ids.view(tokens, TOP_K)
        return Choices(ids, weights, int(ids.unique().numel()))

    return [[choose() for _ in range(LAYERS)] for _ in range(ROUTES)]


def experts_step(
    ops: linear.LinearOps, layers: list[ExpertWeights], tokens: int, isa: int
) -> Callable[[list[Choices]], None]:
    x = torch.randn(tokens, HIDDEN).bfloat16()

    def run(routes: list[Choices]) -> None:
        for w, c in zip(layers, routes):
            formats = int(w.gate_up_format), int(w.down_format)
            ops.packed_experts(
                x, c.ids, c.weights, w.gate_up, w.down, INNER, *formats, None, None, None, x, 1, 0.0, 0.0, isa
            )

    return run


def dense_step(
    ops: linear.LinearOps, layers: list[ExpertWeights], tokens: int, isa: int
) -> Callable[[list[Choices]], None]:
    """The weights of as many experts, one of which each round begins with in turn."""
    rounds = 0

    def run(routes: list[Choices]) -> None:
        nonlocal rounds
        rounds += 1
        for w, c in zip(layers, routes):
            x, hidden = inputs[c.used]
            first = rounds * 5 % (EXPERTS - c.used + 1)
            gate_up, down = (each[first : first + c.used].flatten(0, 1) for each in (w.gate_up, w.down))
            n = c.used * 2 * INNER
            ops.packed_linear(x, gate_up, n, int(w.gate_up_format), None, None, 0.0, None, 1, False, isa)
            n = c.used * HIDDEN
            ops.packed_linear(hidden, down, n, int(w.down_format), None, None, 0.0, None, 0, False, isa)

    inputs = {}
    for used in range(1, EXPERTS + 1):
        rows = max(1, round(tokens * TOP_K / used))
        inputs[used] = torch.randn(rows, HIDDEN).bfloat16(), torch.randn(rows, INNER).bfloat16()
    return run


def memory_reader(cache_dir: Path, threads: int) -> Callable[[], None]:
    """What reads READ_BYTES once."""
    sources = NativeSources("bench_kernels", "pageloom_bench", (Unit(CSRC / "read_probe.cpp"),), headers=())
    read = ctypes.CDLL(str(build(sources, cache_dir).path)).pageloom_read
    read.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]
    buffer = torch.ones(READ_BYTES, dtype=torch.uint8)
    return lambda: read(buffer.data_ptr(), READ_BYTES // 8, threads)


def measure(
    ops: linear.LinearOps, layers: list[ExpertWeights], tokens: int, options: argparse.Namespace
) -> dict[str, float]:
    isa = 0 if options.isa == "auto" else 1 + ISAS.index(options.isa)
    routes = make_routes(ops, tokens, options.even)
    steps = {
        "experts": experts_step(ops, layers, tokens, isa),
        "dense": dense_step(ops, layers, tokens, isa),
    }
    alone = options.threads == 1
    read = memory_reader(options.cache_dir, options.threads)
    rates: dict[str, list[float]] = {name: [] for name in ("experts", "dense", "read", "bytes", "flops")}
    expert_bytes = sum(matrix[0].numel() for matrix in (layers[0].gate_up, layers[0].down))
    for number in range(options.rounds + 1):
        chosen = routes[number % ROUTES]
        seconds = {}
        for name, step in steps.items():
            seconds["read"] = timed(read, alone)
            seconds[name] = timed(partial(step, chosen), alone)
        if number == 0:
            continue
        dense_rows = sum(c.used * max(1, round(tokens * TOP_K / c.used)) for c in chosen)
        rates["experts"].append(seconds["experts"])
        rates["dense"].append(seconds["dense"])
        rates["read"].append(READ_BYTES / seconds["read"])
        rates["bytes"].append(seconds["dense"] / seconds["experts"])
        rates["flops"].append(tokens * TOP_K * LAYERS / seconds["experts"] / (dense_rows / seconds["dense"]))
    return figures(rates, tokens, expert_bytes * statistics.mean(sum(c.used for c in r) for r in routes))


def figures(rates: dict[str, list[float]], tokens: int, step_bytes: float) -> dict[str, float]:
    median = {name: statistics.median(values) for name, values in rates.items()}
    operations = 2 * tokens * TOP_K * LAYERS * 3 * INNER * HIDDEN
    return {
        "tokens": tokens,
        "ms": median["experts"] * 1e3,
        "dense_ms": median["dense"] * 1e3,
        "gb_s": step_bytes / median["experts"] / 1e9,
        "gflop_s": operations / median["experts"] / 1e9,
        "read_gb_s": max(rates["read"]) / 1e9,
        "of_read": step_bytes / median["experts"] / max(rates["read"]),
        "of_dense_bytes": median["bytes"],
        "of_dense_flops": median["flops"],
    }


def timed(run: Callable[[], None], alone: bool) -> float:
    clock = time.thread_time if alone else time.perf_counter
    start = clock()
    run()
    return clock() - start


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens", default="1,8,64,512", help="with commas")
    parser.add_argument("--formats", default="BFLOAT16,INT8,Q4_1", help="of these, with commas")
    parser.add_argument("--even", action="store_true", help="the same number of rows for each expert, not chance")
    parser.add_argument("--isa", choices=("auto", *ISAS), default="auto")
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--cache-dir", type=Path, default=default_cache_dir())
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    torch.manual_seed(0)
    keep_memory()
    ops = linear.load(options.cache_dir, every_isa=True)
    results = []
    for format in (Format[name] for name in options.formats.split(",")):
        layers = make_layers(format)
        choose_reading(ops, sum(w.gate_up.numel() + w.down.numel() for w in layers), options.cache_dir)
        with torch.inference_mode():
            for tokens in map(int, options.tokens.split(",")):
                results.append({"format": format.name, **measure(ops, layers, tokens, options)})
                shown = (f"{k} {v:.4g}" if isinstance(v, float) else f"{k} {v}" for k, v in results[-1].items())
                print("  ".join(shown), flush=True)
    print(json.dumps({"isa": options.isa, "threads": options.threads, "results": results}))


if __name__ == "__main__":
    main()
