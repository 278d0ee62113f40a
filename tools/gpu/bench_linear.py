"""Linear layers of few rows beside the copy bandwidth: the library's, and ours as the engine chooses them.

A decode step at batch 1 does little else than reading the weights once, so `all_linears`, all of a model in one
captured graph against weights over bandwidth, is the least that its decode step can take.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence

import torch
from torch import nn
from torch.nn import functional as F

from engine.models.kernels import BUCKETS, LinearKernels, Plan, decode, device_kernels, plans_for
from engine.models.layers import Linear
from engine.models.linear_choice import choose_linears
from gpu.ceilings import copy_gb_per_s
from gpu.context import Context
from gpu.device import Device
from gpu.models import read_config, shape_directory
from gpu.timing import time_replays

ROWS = (1, 4, 16, 64, 256)
L2_MULTIPLE = 4
MAX_ERROR = 0.01
MULTIPROCESSORS = 132
"""of the device that plans are proposed for; others see more or fewer splits"""
DRY_PLANS = 1


class DryTimer:
    """`engine.models.linear_timing.LinearTimer` by the host's clock."""

    multiprocessors = MULTIPROCESSORS

    def __init__(self, device: Device) -> None:
        self.l2_bytes = device.l2_bytes

    def median_us(self, call: Callable[[int], object], copies: int, size_bytes: int) -> float:
        started = time.perf_counter()
        call(0)
        return 1e6 * (time.perf_counter() - started)

    def copy_gb_per_s(self) -> float:
        return 1e9


def layer_shapes(config: dict[str, object]) -> dict[str, tuple[int, int]]:
    """n, k of each linear layer."""
    hidden, inner, heads, kv_heads, dim, vocab = (
        int(str(config[key]))
        for key in (
            "hidden_size",
            "intermediate_size",
            "num_attention_heads",
            "num_key_value_heads",
            "head_dim",
            "vocab_size",
        )
    )
    return {
        "qkv": ((heads + 2 * kv_heads) * dim, hidden),
        "o": (hidden, heads * dim),
        "gate_up": (2 * inner, hidden),
        "down": (hidden, inner),
        "lm_head": (vocab, hidden),
    }


class Model(nn.Module):
    """A model's linear layers, in the order of a step, with random weights."""

    def __init__(self, shapes: dict[str, tuple[int, int]], num_layers: int, dtype: torch.dtype, device: torch.device):
        super().__init__()
        inner = [name for name in shapes if name != "lm_head"]
        self.names = inner * num_layers + [name for name in shapes if name == "lm_head"]
        self.layers = [Linear(k, n, False, dtype, device) for n, k in (shapes[name] for name in self.names)]
        self.registered = nn.ModuleList(self.layers)
        for parameter in self.parameters():
            parameter.normal_(0.0, parameter.shape[1] ** -0.5)

    @property
    def weight_bytes(self) -> int:
        return sum(parameter.nbytes for parameter in self.parameters())

    def named(self, name: str) -> list[Linear]:
        return [linear for found, linear in zip(self.names, self.layers) if found == name]


def run(context: Context) -> None:
    """Part `linears`."""
    copy = copy_gb_per_s(context.device)
    for shape in ("qwen3-8b",) if context.dry else ("qwen3-8b", "qwen3-0.6b"):
        if context.out_of_time(shape, 12.0):
            continue
        with torch.inference_mode():
            bench_model(context, shape, copy)
        context.device.release_memory()


def bench_model(context: Context, shape: str, copy: float) -> None:
    config = read_config(shape_directory(shape, context.scratch, context.dry))
    # Triton's interpreter multiplies the bits of bfloat16.
    dtype = torch.float16 if context.dry else torch.bfloat16
    shapes = layer_shapes(config)
    if context.dry:
        shapes = {name: shapes[name] for name in ("o", "lm_head")}
    model = Model(shapes, int(config["num_hidden_layers"]), dtype, context.device.torch_device)
    started = time.perf_counter()
    if context.dry:
        timer = DryTimer(context.device)
        choose_linears(model, context.scratch, timer=timer, material={"device": "dry"}, least_bytes=0)
    else:
        choose_linears(model, context.scratch)
    context.figure("choice", {"shape": shape, "seconds": round(time.perf_counter() - started, 2)})
    all_linears(context, shape, model, copy)
    for name in shapes:
        for rows in (1, 3) if context.dry else ROWS:
            if not context.out_of_time(f"{shape} {name} at {rows} rows", 2.0):
                bench_layer(context, shape, name, model.named(name), rows, copy)
        check_layer(context, f"{shape} {name}", model.named(name)[0])


def all_linears(context: Context, shape: str, model: Model, copy: float) -> None:
    """Every weight of the model once, in one graph."""
    floor_us = model.weight_bytes / copy / 1e3
    for rows in (1,) if context.dry else (1, 4, 16):
        like = model.layers[0].weight
        widths = {linear.weight.shape[1] for linear in model.layers}
        x = {k: torch.randn(rows, k, device=like.device).to(like.dtype) for k in widths}

        def library(_: int, x: dict[int, torch.Tensor] = x) -> None:
            for linear in model.layers:
                F.linear(x[linear.weight.shape[1]], linear.weight)

        def ours(_: int, x: dict[int, torch.Tensor] = x) -> None:
            for linear in model.layers:
                linear(x[linear.weight.shape[1]])

        row: dict[str, object] = {"shape": shape, "rows": rows, "floor_us": round(floor_us, 1)}
        for name, call in (("library", library), ("engine", ours)):
            timing = time_replays(context.device, call, 1)
            row[f"{name}_us"] = round(timing.median_us, 1)
            row[f"{name}_over_floor"] = round(timing.median_us / floor_us, 4)
        context.figure("all_linears", row)


def bench_layer(context: Context, shape: str, name: str, linears: Sequence[Linear], rows: int, copy: float) -> None:
    """The library, what the engine takes, and the best of ours even where it takes the library."""
    weight = linears[0].weight
    n, k = weight.shape
    linears = linears[: max(2, -(-L2_MULTIPLE * context.device.l2_bytes // weight.nbytes))]
    x = torch.randn(rows, k, device=weight.device).to(weight.dtype)
    kernels = device_kernels()

    def gb_per_s(call: Callable[[int], object]) -> float:
        return weight.nbytes / time_replays(context.device, call, len(linears)).median_us / 1e3

    library = gb_per_s(lambda i: F.linear(x, linears[i].weight))
    row: dict[str, object] = {"shape": shape, "layer": name, "n": n, "k": k, "rows": rows}
    row |= {"library_gb_per_s": round(library, 1), "library_copy_share": round(library / copy, 4)}
    plans = proposed(context, n, k, rows)
    if plans:
        speeds = {plan: gb_per_s(with_plan(kernels, x, linears, plan)) for plan in plans}
        best = max(speeds, key=speeds.__getitem__)
        row |= {"ours": str(best), "ours_gb_per_s": round(speeds[best], 1)}
        row |= {"ours_copy_share": round(speeds[best] / copy, 4)}
        row |= {"chosen": str(decode(linears[0].choice)[rows] or "library")}
    context.figure("linear", row)


def proposed(context: Context, n: int, k: int, rows: int) -> list[Plan]:
    return plans_for(n, k, rows, MULTIPROCESSORS)[: DRY_PLANS if context.dry else None]


def with_plan(
    kernels: LinearKernels, x: torch.Tensor, linears: Sequence[Linear], plan: Plan
) -> Callable[[int], torch.Tensor]:
    return lambda i: kernels.linear(x, linears[i].weight, None, plan)


def check_layer(context: Context, name: str, linear: Linear) -> None:
    """Every plan computes what the library does, and the same for a row whatever stands beside it."""
    kernels, weight = device_kernels(), linear.weight
    n, k = weight.shape
    for rows in (1, 3) if context.dry else BUCKETS:
        x = torch.randn(rows, k, device=weight.device).to(weight.dtype)
        expected = F.linear(x, weight).float()
        plans = proposed(context, n, k, rows)
        problem = None
        for plan in plans:
            found = kernels.linear(x, weight, None, plan)
            error = float(((found.float() - expected).norm(dim=1) / expected.norm(dim=1)).max())
            if not error <= MAX_ERROR:
                problem = f"{plan}: off by {error:.3g} of a row"
            elif not torch.equal(kernels.linear(x[rows - 1 :], weight, None, plan)[0], found[-1]):
                problem = f"{plan}: a row alone gives other bits than among {rows}"
        context.check(f"{name}, {rows} rows", problem, f"{len(plans)} plans")
