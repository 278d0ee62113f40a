"""KV writes and block copies beside the copy ceiling: both only move bytes."""

from __future__ import annotations

import torch

from attention_backends.interface import AttentionBackend
from gpu.backends import Backends, spec_of
from gpu.ceilings import copy_gb_per_s
from gpu.context import Context
from gpu.timing import host_us, time_calls, time_replays

HEADS, HEAD_DIM, BLOCK = 8, 128, 16
LAYERS = 36


def run(context: Context) -> None:
    """Part `cache kernels`."""
    backend = Backends(context, "cuda").get(spec_of(context, 64 if context.dry else HEAD_DIM))
    copy = copy_gb_per_s(context.device)
    for tokens in (8,) if context.dry else (1, 256, 8192):
        _write_kv(context, backend, tokens, copy)
    for pairs in (2,) if context.dry else (1, 16, 256):
        _copy_blocks(context, backend, pairs, copy)


def _write_kv(context: Context, backend: AttentionBackend, tokens: int, copy: float) -> None:
    device = context.device.torch_device
    heads, head_dim = (2, 64) if context.dry else (HEADS, HEAD_DIM)
    blocks = -(-tokens // BLOCK)
    shape = backend.kv_cache_shape(blocks, BLOCK, heads, head_dim)
    size_bytes = 2 * tokens * heads * head_dim * 2
    copies = max(1, min(64, 4 * context.device.l2_bytes // size_bytes))
    caches = [torch.zeros(shape, dtype=torch.bfloat16, device=device) for _ in range(copies)]
    k, v = (torch.randn(tokens, heads, head_dim, device=device).bfloat16() for _ in range(2))
    slots = torch.randperm(blocks * BLOCK)[:tokens].to(device)
    timing = time_replays(context.device, lambda i: backend.write_kv(k, v, caches[i % copies], slots), copies)
    moved = 2 * size_bytes / timing.median_us / 1e3
    row = {"tokens": tokens, "us": round(timing.median_us, 2), "gb_per_s": round(moved, 1)}
    context.figure("write_kv", row | {"copy_share": round(moved / copy, 4)})


def _copy_blocks(context: Context, backend: AttentionBackend, count: int, copy: float) -> None:
    device = context.device.torch_device
    layers, heads, head_dim = (2, 2, 64) if context.dry else (LAYERS, HEADS, HEAD_DIM)
    shape = backend.kv_cache_shape(2 * count, BLOCK, heads, head_dim)
    caches = [torch.randn(shape, device=device).to(torch.bfloat16) for _ in range(layers)]
    order = torch.randperm(2 * count).tolist()
    pairs = list(zip(order[:count], order[count:], strict=True))
    backend.copy_blocks(caches, pairs)
    for cache in caches:
        for source, target in pairs:
            if not torch.equal(cache[source], cache[target]):
                raise RuntimeError(f"copy_blocks did not copy block {source} to {target}")
    timing = time_calls(context.device, lambda _: backend.copy_blocks(caches, pairs))
    moved = 2 * layers * count * caches[0][0].nbytes / timing.median_us / 1e3
    row = {"pairs": count, "layers": layers, "us": round(timing.median_us, 2), "gb_per_s": round(moved, 1)}
    host = round(host_us(context.device, lambda: backend.copy_blocks(caches, pairs)), 1)
    context.figure("copy_blocks", row | {"copy_share": round(moved / copy, 4), "host_us": host})
