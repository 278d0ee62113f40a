"""What backends say their scratch memory will take is what it takes at most, and not far from it."""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from fake_flashinfer import fake_runtime
from test_cuda_backend import Recorder, batch_of

from attention_backends.cuda import CudaBackend
from attention_backends.flashinfer import FlashInferBackend
from attention_backends.interface import AttentionLayer, AttentionSpec
from attention_backends.reference import ReferenceBackend

LAYERS = [AttentionLayer(8, 2, 64, 0.125), AttentionLayer(8, 2, 64, 0.125, window=40)]
MAX_SEQS = 48
GRAPH_SIZES = (48, 40, 32, 24, 16, 8, 4, 2, 1)


def steps(rng: random.Random) -> list[tuple[Sequence[tuple[int, int]], int | None]]:
    """Batches of all kinds: decodes, short queries with long contexts, prefills; then graphs, largest first."""
    eager = []
    for count in (1, 5, 17, MAX_SEQS):
        eager.append([(1, rng.randint(1, 900)) for _ in range(count)])
        eager.append([(rng.choice((2, 4, 16)), rng.randint(512, 900)) for _ in range(count)])
        eager.append([(1, 9)] * (count // 2) + [(rng.randint(20, 70), 80) for _ in range(count - count // 2)])
    return [*((lengths, None) for lengths in eager), *(([(1, 5)] * size, size) for size in GRAPH_SIZES)]


def test_the_in_tree_backend_stays_below_its_estimate() -> None:
    backend = CudaBackend(Recorder(), multiprocessors=132)
    backend.bind(AttentionSpec(torch.device("cpu"), torch.bfloat16, torch.bfloat16, (64,)))
    estimate = backend.workspace_bytes(MAX_SEQS, LAYERS)
    q = torch.empty(0, 8, 64, dtype=torch.bfloat16)
    cache = torch.empty(1)
    for lengths, graph_size in steps(random.Random(0)):
        metadata = backend.build_metadata(batch_of(lengths, graph_size))
        for layer in LAYERS:
            backend.forward(q, q, q, q, cache, layer, metadata)
    used = backend._prepared().workspace.size_bytes
    assert estimate / 8 < used <= estimate


def test_flashinfer_stays_below_its_estimate(monkeypatch: pytest.MonkeyPatch) -> None:
    backend = FlashInferBackend(fake_runtime())
    backend.prepare()
    estimate = backend.workspace_bytes(MAX_SEQS, LAYERS)
    allocated: list[int] = []

    def counting(make: Any) -> Any:
        def counted(*args: Any, **kwargs: Any) -> torch.Tensor:
            made: torch.Tensor = make(*args, **kwargs)
            if made.dtype == torch.uint8 and "device" in kwargs:
                allocated.append(made.nbytes)
            return made

        return counted

    with monkeypatch.context() as patch:
        for name in ("zeros", "empty"):
            patch.setattr(torch, name, counting(getattr(torch, name)))
        for lengths, graph_size in steps(random.Random(1)):
            batch = batch_of(lengths, graph_size)
            tokens = batch.num_tokens
            q = torch.zeros(tokens, 8, 64, dtype=torch.bfloat16)
            kv = torch.zeros(tokens, 2, 64, dtype=torch.bfloat16)
            cache = torch.zeros(backend.kv_cache_shape(80, 16, 2, 64), dtype=torch.bfloat16)
            metadata = backend.build_metadata(batch)
            for layer in LAYERS:
                backend.forward(q, kv, kv, torch.empty_like(q), cache, layer, metadata)
    assert estimate / 8 < sum(allocated) <= estimate


def test_a_backend_without_scratch_memory_says_so() -> None:
    assert ReferenceBackend().workspace_bytes(MAX_SEQS, LAYERS) == 0


def test_the_estimates_of_a_large_model_leave_room_for_it() -> None:
    """Qwen3-8B on a GPU of 132 processors, 256 sequences: hundreds of MiB at most."""
    layers = [AttentionLayer(32, 8, 128, 128**-0.5)] * 36
    in_tree = CudaBackend(Recorder(), multiprocessors=132)
    in_tree.bind(AttentionSpec(torch.device("cpu"), torch.bfloat16, torch.bfloat16, (128,)))
    library = FlashInferBackend(fake_runtime())
    library.prepare()
    assert 1 << 20 < in_tree.workspace_bytes(256, layers) <= 160 << 20
    assert 1 << 20 < library.workspace_bytes(256, layers) <= 400 << 20
