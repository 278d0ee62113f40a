"""Latent attention of the `cuda` backend against the equation in float64, and captured; and how long a decode takes."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch

from attention_backends.interface import AttentionBackend
from attention_backends.reference import ReferenceBackend
from gpu.backends import Backends, spec_of
from gpu.check_attention import compare, difference, lengths_of
from gpu.context import Context, load_test_module

SIZES: dict[str, dict[str, object]] = {
    "deepseek, a rank's heads": {"rank": 512, "common": 64, "made": 128, "value_dim": 128, "num_heads": 16},
    "deepseek": {"rank": 512, "common": 64, "made": 128, "value_dim": 128, "num_heads": 128},
    "glm": {"rank": 512, "common": 64, "made": 192, "value_dim": 256, "num_heads": 20},
    "mistral": {"rank": 256, "common": 64, "made": 64, "value_dim": 128, "num_heads": 32},
    "tiny": {"rank": 16, "common": 8, "made": 16, "value_dim": 16, "num_heads": 4},
}
GRAPH = [(1, 300), (1, 1), (1, 64), (1, 1025), (1, 17)]
TIMED = ((1, 4096), (64, 4096))
"""sequences, and the length of each"""


def run(context: Context) -> None:
    """Part `attention-latents`."""
    case_class = load_test_module("attention_backends", "latent_case").LatentCase
    backends = Backends(context, "cuda")
    device = context.device.torch_device.type
    for dtype in (torch.bfloat16, torch.float16):
        backend = backends.get(spec_of(context, 64, dtype))
        for size, changes in SIZES.items():
            for name, lengths in {**lengths_of(16), "graph": GRAPH}.items():
                case = case_class(lengths, device=device, dtype=dtype, **changes)
                case = replace(case, graph_size=8) if name == "graph" else case
                label = f"latents: {size} {name} {str(dtype).removeprefix('torch.')}"
                if (context.dry and (dtype == torch.bfloat16 or size != "tiny")) or context.out_of_time(label, 3.0):
                    continue
                context.check(label, compare(backend, case)[0])
        if dtype == torch.float16 or not context.dry:
            tiny = case_class(GRAPH, device=device, dtype=dtype, graph_size=8, **SIZES["tiny"])
            context.check(f"latents: a graph replayed on other lengths, {dtype}", _replayed(context, backend, tiny))
    if not context.dry:
        shape = SIZES["deepseek, a rank's heads"]
        for count, length in TIMED:
            case = case_class([(1, length)] * count, device=device, dtype=torch.bfloat16, **shape)
            _time(context, backends.get(spec_of(context, 64)), case)
    backends.close()


def _replayed(context: Context, backend: AttentionBackend, case: Any) -> str | None:
    """Capture a padded decode, then replay it with all sequences half as long: what is wrong, or None."""
    q, rows, _ = case.qkv()
    cache = torch.zeros(case.cache_shape(backend), dtype=case.dtype, device=case.device)
    tables = case.block_tables()
    known, _ = case.prefix()
    backend.write_kv(
        known, known, cache, torch.cat([case.slots(tables, i, 0, n - 1) for i, (_, n) in enumerate(GRAPH)])
    )
    batch, out = case.batch(tables), torch.empty(case.num_tokens, case.num_heads, case.value_dim).to(q)
    layer, metadata = case.layer, backend.build_metadata(batch)
    replay = context.device.capture(lambda: backend.forward(q, rows, rows, out, cache, layer, metadata))
    batch.seq_lens.copy_((batch.seq_lens + 1) // 2)
    batch.slot_mapping.fill_(-1)
    out.fill_(float("nan"))
    replay()
    context.device.synchronize()
    if not (out[len(GRAPH) :] == 0).all():
        return "rows of a graph's padding are not zero"
    paged = torch.zeros(case.cache_shape(ReferenceBackend()), dtype=torch.float64, device=case.device)
    paged.view(-1).copy_(cache.reshape(-1))
    want = torch.empty(out.shape, dtype=torch.float64, device=case.device)
    ReferenceBackend().forward(q.double(), rows, rows, want, paged, replace(layer, shares=0), batch)
    return difference(out[: len(GRAPH)], want[: len(GRAPH)], case.dtype)[0]


def _time(context: Context, backend: AttentionBackend, case: Any) -> None:
    """One layer's decode in a graph, absorption and the values' matrix included; its rows are likely in the L2."""
    q, rows, _ = case.qkv()
    cache = torch.zeros(case.cache_shape(backend), dtype=case.dtype, device=case.device)
    out = torch.empty(case.num_tokens, case.num_heads, case.value_dim).to(q)
    metadata = backend.build_metadata(replace(case.batch(case.block_tables()), graph_size=len(case.lengths)))
    layer, repeats = case.layer, 20

    def steps() -> None:
        for _ in range(repeats):
            backend.forward(q, rows, rows, out, cache, layer, metadata)

    replay = context.device.capture(steps)
    replay()
    begun = context.device.record()
    replay()
    ended = context.device.record()
    context.device.synchronize()
    took = context.device.elapsed_ms(begun, ended) / repeats
    read = sum(length for _, length in case.lengths) * (case.rank + case.common) * 2
    row = {"sequences": len(case.lengths), "length": case.lengths[0][1], "heads": case.num_heads}
    context.figure("latent_decode", row | {"us": took * 1e3, "cache_gb_per_s": read / took / 1e6})
