"""Every native attention backend against the equation in float64, on the device, over the grid of what it declares."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import torch

from attention_backends.interface import AttentionBackend, AttentionBatch, AttentionSpec
from attention_backends.reference import ReferenceBackend
from gpu.backends import FP8, Backends, spec_of
from gpu.context import Context, load_test_module

HEAD_DIMS = (128, 64, 96, 256)
BLOCKS = (16, 32, 64, 128)
HEADS = ((8, 2), (4, 4), (7, 1), (32, 8), (16, 1))
DTYPES = (torch.bfloat16, torch.float16)
FEATURES: tuple[dict[str, object], ...] = (
    {},
    {"window": 21},
    {"soft_cap": 20.0},
    {"sinks": True},
    {"window": 70, "soft_cap": 5.0, "sinks": True},
    {"chunk": 48},
    {"spread": 8.0},
)
FP8_CACHE = {"kv_dtype": FP8, "k_scale": 0.5, "v_scale": 2.0}
# Rounding the output costs half a unit in its last place, rounding probabilities as much again per key.
RELATIVE = {torch.bfloat16: 2**-7, torch.float16: 2**-9, torch.float32: 1e-4}
ABSOLUTE = {torch.bfloat16: 2**-6, torch.float16: 2**-8, torch.float32: 1e-4}
NORM_LIMIT = {torch.bfloat16: 1e-2, torch.float16: 2e-3, torch.float32: 1e-4}
"""of norm(out - oracle) / norm(oracle)"""
DRY_STRIDE = 4
GRAPH_SIZE = 8
REPLAY_LENGTHS = ([300, 1, 64, 1025, 17], [2, 1000, 513, 16, 40, 77, 129])

Lengths = list[tuple[int, int]]


def lengths_of(block: int) -> dict[str, Lengths]:
    """(queries, KV length) per sequence: edges of pages, of tiles (64, 128) and of splits (256, 512)."""
    return {
        "edges": [(1, n) for n in (1, block - 1, block, block + 1, 2 * block, 63, 64, 65, 127, 129, 255, 257, 513)],
        "long decode": [(1, 4097), (1, 1), (1, 2048), (1, 3), (1, 1025)],
        "verify": [(4, 300), (4, 5), (4, 64), (4, 129)],
        "prefill": [(block, block), (block + 1, block + 1), (1, 1), (127, 127), (129, 129), (300, 300)],
        "mixed": [(1, 300), (1, 33), (37, 37), (5, 261), (1, 1), (130, 390), (0, 7), (2, 2), (64, 1000)],
    }


def grid(case_class: Any, device: str) -> Iterator[tuple[str, Any]]:
    """Name and case. A core in full, then each further axis around it, so that every pair of axes meets."""
    defaults: dict[str, object] = {"device": device, "dtype": torch.bfloat16, "head_dim": 128}
    defaults |= {"num_heads": 8, "num_kv_heads": 2, "block_size": 16}

    def case(name: str, lengths: Lengths, **changes: object) -> tuple[str, Any]:
        values = defaults | changes
        shown = ",".join(f"{k}={str(v).removeprefix('torch.')}" for k, v in changes.items())
        return f"{name} {shown}", case_class(lengths, **values)

    for head_dim, block, (name, lengths) in itertools.product(HEAD_DIMS, BLOCKS, lengths_of(16).items()):
        yield case(name, lengths, head_dim=head_dim, block_size=block)
    padded = [(1, n) for n in REPLAY_LENGTHS[0]]
    variants: list[dict[str, object]] = [*FEATURES, FP8_CACHE, {**FP8_CACHE, "window": 21}]
    for head_dim, extra in itertools.product(HEAD_DIMS, variants):
        for name, lengths in lengths_of(16).items():
            yield case(name, lengths, head_dim=head_dim, **extra)
        yield case("graph", padded, head_dim=head_dim, graph_size=GRAPH_SIZE, **extra)
    for heads, dtype, extra in itertools.product(HEADS, DTYPES, ({}, FP8_CACHE)):
        for name in ("edges", "mixed", "verify"):
            changes = {"num_heads": heads[0], "num_kv_heads": heads[1], "dtype": dtype, **extra}
            yield case(name, lengths_of(16)[name], **changes)
    for seed in range(1, 9):
        yield case("mixed", lengths_of(16)["mixed"], seed=seed)


def refused(backend: AttentionBackend | Backends, case: Any) -> bool:
    """True where the backend says that it cannot."""
    able = backend.capabilities()
    return (
        case.dtype not in able.dtypes
        or (able.head_dims is not None and case.head_dim not in able.head_dims)
        or (able.block_sizes is not None and case.block_size not in able.block_sizes)
        or (case.kv_dtype is not None and case.kv_dtype not in able.kv_dtypes)
        or (case.window is not None and not able.window)
        or (case.soft_cap is not None and not able.soft_cap)
        or (case.sinks and not able.sinks)
        or (case.chunk is not None and not able.chunk)
        or (case.graph_size is not None and not able.capture_safe)
    )


def difference(got: torch.Tensor, want: torch.Tensor, dtype: torch.dtype) -> tuple[str | None, float]:
    """What is wrong, or None; and norm(got - want) / norm(want)."""
    if not got.isfinite().all():
        return f"{int((~got.isfinite()).sum())} of {got.numel()} elements are not finite", float("nan")
    error = (got.double() - want).norm().item() / max(want.norm().item(), 1e-30)
    if error > NORM_LIMIT[dtype]:
        return f"relative norm error {error:.2e} (limit {NORM_LIMIT[dtype]:.0e})", error
    far = (got.double() - want).abs() > ABSOLUTE[dtype] + RELATIVE[dtype] * want.abs()
    if far.any():
        worst = (got.double() - want).abs().max().item()
        return f"{int(far.sum())} of {far.numel()} elements beyond tolerance, worst by {worst:.3g}", error
    return None, error


def run(context: Context, name: str) -> None:
    """Parts `attention-cuda` and `attention-flashinfer`."""
    case_class = load_test_module("attention_backends", "paged_case").Case
    backends = Backends(context, name)
    groups: dict[AttentionSpec, list[tuple[str, Any]]] = {}
    for label, case in chosen_cases(context, case_class):
        groups.setdefault(spec_of(context, case.head_dim, case.dtype, case.kv_dtype), []).append((label, case))
    backends.prefetch(groups)
    worst, ran, refusals = 0.0, 0, 0
    for spec, cases in groups.items():
        if context.out_of_time(f"{name}: {len(cases)} cases of {spec}", 5.0):
            continue
        if refused(backends, cases[0][1]):
            refusals += len(cases)
            continue
        backend = backends.get(spec)
        for label, case in cases:
            if context.out_of_time(f"{name}: {label}", 3.0):
                break
            if refused(backend, case):
                refusals += 1
                continue
            problem, error = compare(backend, case)
            worst = max(worst, error)
            ran += 1
            context.check(f"{name}: {label}", problem)
        if backend.capabilities().capture_safe:
            context.check(f"{name}: a graph replayed on other lengths, {spec}", replayed(context, backend, spec))
    backends.close()
    row = {"backend": name, "cases": ran, "not_supported": refusals, "worst_norm_error": worst}
    context.figure("attention", row)


def chosen_cases(context: Context, case_class: Any) -> list[tuple[str, Any]]:
    cases = list(grid(case_class, context.device.torch_device.type))
    if not context.dry:
        return cases
    small = [pair for pair in cases if pair[1].num_tokens <= 20 and pair[1].head_dim == 64]
    return [pair for pair in small if pair[1].dtype == torch.bfloat16 and pair[1].kv_dtype is None][::DRY_STRIDE]


def compare(backend: AttentionBackend, case: Any) -> tuple[str | None, float]:
    """What is wrong, or None; and the relative norm error."""
    want = case.run(ReferenceBackend(), torch.float64)
    try:
        got = case.run(backend)
    except (RuntimeError, ValueError, AssertionError) as error:
        return f"{type(error).__name__}: {error}", 0.0
    real = sum(queries for queries, _ in case.lengths)
    if not (got[real:] == 0).all():
        return "rows of a graph's padding are not zero", 0.0
    return difference(got[:real], want[:real], case.dtype)


def replayed(context: Context, backend: AttentionBackend, spec: AttentionSpec) -> str | None:
    """Capture a padded decode, then replay it on other lengths, pages and tokens: what is wrong, or None."""
    case_class = load_test_module("attention_backends", "paged_case").Case
    shape: dict[str, object] = {"num_heads": 8, "num_kv_heads": 2, "head_dim": spec.head_dims[0], "dtype": spec.dtype}
    shape |= {"device": spec.device.type, "graph_size": GRAPH_SIZE}
    shape |= FP8_CACHE if spec.kv_dtype == FP8 else {}
    small = 20 if context.dry else 1
    first, second = (
        case_class([(1, max(1, n // small)) for n in lengths], seed=i, **shape)
        for i, lengths in enumerate(REPLAY_LENGTHS)
    )
    larger = max(first, second, key=lambda case: case.num_blocks)
    cache = larger.empty_cache(backend, spec.kv_dtype)
    static: dict[str, torch.Tensor] = {}

    def load(case: Any) -> AttentionBatch:
        """The case's cache, tokens and batch in the graph's buffers."""
        cache.copy_(larger.empty_cache(backend, spec.kv_dtype))
        tables = case.block_tables()
        k, v = case.prefix()
        cached = [case.slots(tables, i, 0, n - 1) for i, (_, n) in enumerate(case.lengths)]
        backend.write_kv(k, v, cache, torch.cat(cached), case.k_scale, case.v_scale)
        batch: AttentionBatch = case.batch(tables)
        fields = ("query_start_loc", "seq_lens", "block_tables", "slot_mapping")
        tensors = dict(zip("qkv", case.qkv(), strict=True)) | {name: getattr(batch, name) for name in fields}
        for name, tensor in tensors.items():
            if name not in static:
                static[name] = tensor.clone() if name != "block_tables" else tensor.new_full((GRAPH_SIZE, 80), 2**30)
            where = static[name][:, : tensor.shape[1]] if name == "block_tables" else static[name]
            where.copy_(tensor)
        return replace(
            batch,
            query_start_loc=static["query_start_loc"],
            seq_lens=static["seq_lens"],
            block_tables=static["block_tables"],
            slot_mapping=static["slot_mapping"],
        )

    def forward(metadata: object) -> None:
        backend.forward(static["q"], static["k"], static["v"], out, cache, first.layer, metadata)

    batch = load(first)
    out = torch.full_like(static["q"], float("nan"))
    metadata = backend.build_metadata(batch)
    replay = context.device.capture(lambda: forward(metadata))
    backend.build_metadata(load(second))
    out.fill_(float("nan"))
    replay()
    context.device.synchronize()
    real = len(second.lengths)
    if not (out[real:GRAPH_SIZE] == 0).all():
        return "rows of a graph's padding are not zero"
    return difference(out[:real], second.run(ReferenceBackend(), torch.float64)[:real], spec.dtype)[0]
