"""Experts and matrices that stay packed: checked by the tests' own cases on the device, then timed beside the library's
products of the same values in bf16."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import fields, is_dataclass, replace
from typing import Any

import torch
from torch.nn import functional as F

from engine.cpu_kernels.formats import Format
from engine.models.product_kernels import DENSE, FORMATS, Gate, Matrix, RoutingRules, device_kernels
from gpu.ceilings import copy_gb_per_s, matmul_tflop_per_s
from gpu.context import Context, load_test_module
from gpu.timing import time_replays

EXPERTS = {  # experts, inner, hidden, choices of a token
    "gemma4-26b": (128, 704, 2816, 8),
    "qwen3-30b-a3b": (128, 768, 2048, 8),
}
TOKENS = (1, 8, 64, 512, 4096)
ROUTINGS = 4
"""other choices in each call, so that few tokens' experts are not found in the L2"""
MATRIX = (12288, 4096)
ROWS = (1, 4, 16, 64, 1024)


def moved(value: Any, device: torch.device | str) -> Any:
    """The same with every tensor on `device`."""
    if isinstance(value, torch.Tensor):
        return value.to(device)
    if isinstance(value, tuple):
        return tuple(moved(each, device) for each in value)
    if is_dataclass(value) and not isinstance(value, type):
        return replace(value, **{f.name: moved(getattr(value, f.name), device) for f in fields(value)})
    return value


def on_device(function: Callable[..., Any], device: torch.device) -> Callable[..., Any]:
    """Takes CPU tensors, and returns some."""
    return lambda *arguments: moved(function(*(moved(each, device) for each in arguments)), "cpu")


class OnDevice:
    """Kernels that are handed CPU tensors."""

    def __init__(self, kernels: Any, device: torch.device) -> None:
        self._kernels, self._device = kernels, device

    def __getattr__(self, name: str) -> Any:
        return on_device(getattr(self._kernels, name), self._device)


def run_checks(context: Context) -> None:
    """Part `products`."""
    cases: Any = load_test_module("models", "interpret_products")
    device = context.device.torch_device
    cases.KERNELS = OnDevice(device_kernels(), device)
    cases.placed = on_device(cases.placed, device)
    for name in ("route", "placing") if context.dry else cases.CASES:
        problem = None
        try:
            cases.CASES[name]()
        except AssertionError as error:
            problem = str(error) or "differs"
        context.check(f"products: {name}", problem)


def run_states(context: Context) -> None:
    """Part `states`."""
    cases: Any = load_test_module("models", "interpret_states").CASES
    for name in cases:
        problem = None
        try:
            cases[name](context.device.torch_device)
        except AssertionError as error:
            problem = str(error) or "differs"
        context.check(f"states: {name}", problem)


def run_experts(context: Context) -> None:
    """Part `experts`."""
    copy, peak = copy_gb_per_s(context.device), matmul_tflop_per_s(context.device)
    shapes = {"dry": (4, 32, 64, 2)} if context.dry else EXPERTS
    for name, shape in shapes.items():
        if context.out_of_time(name, 15.0):
            continue
        with torch.inference_mode():
            for tokens in (1, 12) if context.dry else TOKENS:
                bench_experts(context, name, shape, tokens, copy, peak)
        context.device.release_memory()


def bench_experts(
    context: Context, name: str, shape: tuple[int, int, int, int], tokens: int, copy: float, peak: float
) -> None:
    count, inner, hidden, top_k = shape
    device, kernels = context.device.torch_device, device_kernels()
    dtype = torch.float16 if context.dry else torch.bfloat16
    gate_up = torch.empty(count, 2 * inner, hidden, dtype=dtype, device=device).normal_(0.0, hidden**-0.5)
    down = torch.empty(count, hidden, inner, dtype=dtype, device=device).normal_(0.0, inner**-0.5)
    x = torch.randn(tokens, hidden, device=device).to(dtype)
    rules = RoutingRules(0, top_k, True, 1, 1, 1.0)
    logits = [torch.randn(tokens, count, device=device) for _ in range(ROUTINGS)]
    routed = [kernels.route(each, None, rules) for each in logits]
    matrices = Matrix(gate_up, None, DENSE), Matrix(down, None, DENSE)

    def ours(i: int) -> torch.Tensor:
        return kernels.experts(x, *routed[i], matrices, (None, None), None, Gate(1))

    def library(i: int) -> torch.Tensor:
        ids, factors = routed[i]
        order = torch.argsort(ids.flatten())
        ends = torch.searchsorted(ids.flatten()[order], torch.arange(count, device=device), right=True, out_int32=True)
        rows = torch._grouped_mm(x[order // top_k], gate_up.transpose(1, 2), offs=ends)
        gate, up = rows.chunk(2, dim=1)
        rows = torch._grouped_mm(F.silu(gate) * up, down.transpose(1, 2), offs=ends)
        out = torch.empty_like(rows)
        out[order] = rows
        return (out.view(tokens, top_k, hidden) * factors[..., None]).sum(1).to(dtype)

    row: dict[str, object] = {"shape": name, "tokens": tokens}
    routing = time_replays(context.device, lambda i: kernels.route(logits[i], None, rules), ROUTINGS)
    row["route_us"] = round(routing.median_us, 1)
    us = time_replays(context.device, ours, ROUTINGS).median_us
    used = sum(int(torch.bincount(ids.flatten()).count_nonzero()) for ids, _ in routed)  # experts, over all routings
    read = used / ROUTINGS * 3 * inner * hidden * 2
    row |= {"us": round(us, 1), "copy_share": round(read / us / 1e3 / copy, 4)}
    row["matmul_share"] = round(6 * tokens * top_k * inner * hidden / us / 1e6 / peak, 4)
    if not context.dry:
        row["library_us"] = round(time_replays(context.device, library, ROUTINGS).median_us, 1)
        error = float((ours(0).float() - library(0).float()).norm() / library(0).float().norm())
        context.check(f"{name}, {tokens} tokens", None if error <= 0.01 else f"off by {error:.3g} of the library's")
    context.figure("experts", row)


def run_packed(context: Context) -> None:
    """Part `packed-linears`: every format, random levels, beside the library's bf16."""
    copy, device = copy_gb_per_s(context.device), context.device.torch_device
    n, k = (64, 256) if context.dry else MATRIX
    dtype = torch.float16 if context.dry else torch.bfloat16
    with torch.inference_mode():
        dense = [torch.randn(n, k, device=device).to(dtype) for _ in range(2)]
        for rows in (1, 3) if context.dry else ROWS:
            if not context.out_of_time(f"{rows} rows", 5.0):
                x = torch.randn(rows, k, device=device).to(dtype)
                bench_packed(context, x, dense, copy)


def bench_packed(context: Context, x: torch.Tensor, dense: list[torch.Tensor], copy: float) -> None:
    kernels, (n, k) = device_kernels(), dense[0].shape
    library = time_replays(context.device, lambda i: F.linear(x, dense[i]), 2).median_us
    for format in FORMATS:
        copies = [random_matrix(format, n, k, x.device) for _ in range(4)]

        def ours(i: int, copies: list[Matrix] = copies) -> torch.Tensor:
            return kernels.linear(x, copies[i], None)

        us = time_replays(context.device, ours, len(copies)).median_us
        size = sum(part.nbytes for part in (copies[0].levels, copies[0].scales) if part is not None)
        row = {"format": Format(format).name, "rows": len(x)}
        row |= {"us": round(us, 1), "library_us": round(library, 1), "copy_share": round(size / us / 1e3 / copy, 4)}
        context.figure("packed_linear", row)


def random_matrix(format: int, n: int, k: int, device: torch.device) -> Matrix:
    """Any levels, and scales that are small numbers."""
    wide = 192 if format == Format.Q6_K else 256 if format in (Format.INT8, Format.Q8_0, Format.FLOAT8) else 128
    levels = torch.randint(0, 120, (n, k // 256 * wide), dtype=torch.uint8, device=device)
    if format in (Format.INT8, Format.FLOAT8):
        scales = torch.full((n, 1), 0.01, device=device)
    else:
        words = {int(Format.Q6_K): 9, int(Format.Q4_K): 10, int(Format.Q4_0): 8, int(Format.Q8_0): 8}.get(format, 16)
        scales = torch.full((n, k // 256 * words), 0.01, dtype=torch.float16, device=device).view(torch.int16)
    return Matrix(levels.view(torch.int8) if format in (Format.INT8, Format.Q8_0) else levels, scales, format)
