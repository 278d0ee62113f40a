"""How fast are the packed linear layers, beside torch's own and beside what the machine can do?

Runs every linear layer of a model (SmolLM2-135M by default), each with weights of its own, one after another as a step
does: packed (`engine.cpu_kernels`), `F.linear`, and oneDNN with weights it re-ordered for that number of rows. In the
same run, in alternation: how fast torch reads memory, and its best matrix product. Times are minima over the rounds.

    python -m tools.bench_linear [--rows 1,16,256] [--isa avx512bf16] [--threads 2] [--format INT8]

Formats that are made of a checkpoint's blocks run with random ones.
"""

from __future__ import annotations

import argparse
import ctypes
import functools
import json
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.nn.functional as F

from attention_backends.native_build import ISAS
from attention_backends.toolchain import default_cache_dir
from engine.cpu_kernels import linear, quantize
from engine.cpu_kernels.formats import Format
from engine.cpu_kernels.reading import choose_reading

LAYERS = 30
SHAPES = (("qkv", 960, 576, False), ("o", 576, 576, False), ("gate_up", 3072, 576, True), ("down", 576, 1536, False))
VOCABULARY, HIDDEN = 49152, 576
ROWS = "1,2,4,8,16,32,64,128,256,2048"
CALIBRATION_SIZE = 2048


@dataclass(frozen=True)
class Layer:
    weight: torch.Tensor
    packed: torch.Tensor
    gated: bool


def keep_memory() -> None:
    """What is freed stays with the process: outputs of 200 MB would else be pages to clear in every round (glibc)."""
    most_mappings, trim_threshold = -4, -1  # malloc.h
    libc = ctypes.CDLL(None)
    if hasattr(libc, "mallopt"):
        libc.mallopt(most_mappings, 0)
        libc.mallopt(trim_threshold, -1)


def make_layers(format: Format) -> list[Layer]:
    """SmolLM2-135M's layers in the order of a step, the unembedding last."""
    pack = {Format.BFLOAT16: linear.pack_bf16, **quantize.PACK_DENSE}.get(format) or functools.partial(_random, format)
    shapes = [(n, k, gated) for _ in range(LAYERS) for _, n, k, gated in SHAPES] + [(VOCABULARY, HIDDEN, False)]
    weights = [(torch.randn(n, k, dtype=torch.bfloat16) * 0.05, gated) for n, k, gated in shapes]
    return [Layer(weight, pack(weight), gated) for weight, gated in weights]


def _random(format: Format, weight: torch.Tensor) -> torch.Tensor:
    """Packed blocks of any bytes, whose values do not matter, but are finite."""
    n, k = weight.shape
    return torch.randint(60, 116, (-(-n // linear.PANEL), linear.panel_bytes(k, format)), dtype=torch.uint8)


def packed_sweep(ops: linear.LinearOps, layers: list[Layer], rows: int, format: Format, isa: int) -> Callable[[], None]:
    inputs = {layer.weight.size(1): torch.randn(rows, layer.weight.size(1)).bfloat16() for layer in layers}

    def run() -> None:
        for layer in layers:
            n, k = layer.weight.shape
            ops.packed_linear(
                inputs[k], layer.packed, n, int(format), None, None, 0.0, None, int(layer.gated), False, isa
            )

    return run


def torch_sweep(layers: list[Layer], rows: int) -> Callable[[], None]:
    inputs = {layer.weight.size(1): torch.randn(rows, layer.weight.size(1)).bfloat16() for layer in layers}

    def run() -> None:
        for layer in layers:
            F.linear(inputs[layer.weight.size(1)], layer.weight)

    return run


def onednn_sweep(layers: list[Layer], rows: int) -> Callable[[], None] | None:
    """Weights re-ordered for this number of rows, as Inductor's freezing would. None: this torch has no such op."""
    if not torch.backends.mkldnn.is_available():  # type: ignore[no-untyped-call]  # torch leaves it untyped
        return None
    inputs = {layer.weight.size(1): torch.randn(rows, layer.weight.size(1)).bfloat16() for layer in layers}
    reordered = [
        (torch.ops.mkldnn._reorder_linear_weight(layer.weight, rows), layer.weight.size(1)) for layer in layers
    ]
    multiply = torch.ops.mkldnn._linear_pointwise

    def run() -> None:
        for weight, k in reordered:
            multiply(inputs[k], weight, None, "none", [], "")

    return run


def read_memory(layers: list[Layer]) -> Callable[[], None]:
    """Every byte of the packed weights once, by torch's widest reduction."""
    words = [layer.packed.view(torch.int64) for layer in layers]

    def run() -> None:
        for word in words:
            word.sum()

    return run


def matrix_product(format: Format) -> Callable[[], None]:
    """torch's product of what the layers multiply: int8 for int8 layers, else bf16."""
    a, b = (torch.randn(CALIBRATION_SIZE, CALIBRATION_SIZE).bfloat16() for _ in range(2))
    if format is Format.INT8:
        a, b = a.mul(30).to(torch.int8), b.mul(30).to(torch.int8)

    def run() -> None:
        torch._int_mm(a, b) if format is Format.INT8 else torch.mm(a, b)

    return run


def fastest(runs: dict[str, Callable[[], None]], rounds: int) -> dict[str, float]:
    """Seconds of each, the minimum over rounds that take them in turn."""
    best = dict.fromkeys(runs, float("inf"))
    for _ in range(rounds):
        for name, run in runs.items():
            start = time.perf_counter()
            run()
            best[name] = min(best[name], time.perf_counter() - start)
    return best


def measure(ops: linear.LinearOps, layers: list[Layer], rows: int, options: argparse.Namespace) -> dict[str, float]:
    isa = 0 if options.isa == "auto" else 1 + ISAS.index(options.isa)
    format = Format[options.format]
    runs = {
        "packed": packed_sweep(ops, layers, rows, format, isa),
        "read": read_memory(layers),
        "matmul": matrix_product(format),
    }
    if not options.alone:
        runs["linear"] = torch_sweep(layers, rows)
        if (prepacked := onednn_sweep(layers, rows)) is not None:
            runs["onednn"] = prepacked
    rounds = max(3, min(options.rounds, int(options.rounds * 16 / rows)))
    seconds = fastest(runs, rounds)
    size = sum(layer.packed.numel() for layer in layers)
    operations = 2 * rows * sum(layer.weight.numel() for layer in layers)
    figures = {f"{name}_ms": second * 1e3 for name, second in seconds.items() if name not in ("read", "matmul")}
    return {
        "rows": rows,
        **figures,
        "gb_s": size / seconds["packed"] / 1e9,
        "read_gb_s": size / seconds["read"] / 1e9,
        "gflop_s": operations / seconds["packed"] / 1e9,
        "matmul_gflop_s": 2 * CALIBRATION_SIZE**3 / seconds["matmul"] / 1e9,
    }


def host_cost(ops: linear.LinearOps) -> float:
    """Microseconds of one call on a layer of 32 x 32 at one row."""
    packed, x = linear.pack_bf16(torch.randn(32, 32)), torch.randn(1, 32).bfloat16()

    def run() -> None:
        for _ in range(1000):
            ops.packed_linear(x, packed, 32, 0, None, None, 0.0, None, False, False, 0)

    return fastest({"call": run}, 10)["call"] * 1e3


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", default=ROWS, help="numbers of rows, with commas")
    parser.add_argument("--isa", choices=("auto", *ISAS), default="auto")
    parser.add_argument("--format", choices=[format.name for format in Format], default="BFLOAT16")
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--alone", action="store_true", help="leave out F.linear and oneDNN")
    parser.add_argument("--cache-dir", type=Path, default=default_cache_dir())
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    torch.manual_seed(0)
    keep_memory()
    ops = linear.load(options.cache_dir, every_isa=True)
    layers = make_layers(Format[options.format])
    choose_reading(ops, sum(layer.packed.numel() for layer in layers), options.cache_dir)
    results = []
    with torch.inference_mode():
        for rows in map(int, options.rows.split(",")):
            results.append(measure(ops, layers, rows, options))
            print("  ".join(f"{name} {value:.4g}" for name, value in results[-1].items()), flush=True)
        call_us = host_cost(ops)
    print(f"host cost of a call: {call_us:.2f} us")
    summary = {"isa": options.isa, "format": options.format, "threads": options.threads}
    print(json.dumps({**summary, "call_us": call_us, "results": results}))


if __name__ == "__main__":
    main()
