"""The cache side of the CPU backend: writes, copies, and refusals instead of wild memory accesses."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from paged_case import Case

from attention_backends.cpu import CpuBackend, CpuMetadata, Isa
from attention_backends.interface import AttentionBackend
from attention_backends.reference import ReferenceBackend

Prepared = Callable[[Isa], CpuBackend]
DTYPES = [torch.float32, torch.bfloat16, torch.float16]


def attend(backend: AttentionBackend, case: Case, cache: torch.Tensor, tables: torch.Tensor) -> torch.Tensor:
    q, k, v = case.qkv()
    out = torch.zeros(q.shape, dtype=q.dtype)
    backend.forward(q, k, v, out, cache, case.layer, backend.build_metadata(case.batch(tables)))
    return out[: case.num_tokens]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_copied_blocks_attend_like_their_sources_in_every_layer(cpu_backend: Prepared, dtype: torch.dtype) -> None:
    backend, case = cpu_backend("auto"), Case([(1, 40)], dtype=dtype)
    tables = torch.tensor([[0, 1, 2]], dtype=torch.int32)
    caches = [torch.full(backend.kv_cache_shape(6, 16, 2, 64), float("nan"), dtype=dtype) for _ in range(3)]
    k, v = case.prefix()
    for i, cache in enumerate(caches):
        backend.write_kv(k * (i + 1), v * (i + 1), cache, case.slots(tables, 0, 0, 39))
    want = [attend(backend, case, cache.clone(), tables) for cache in caches]
    backend.copy_blocks(caches, [(0, 5), (1, 3), (2, 4)])
    for cache in caches:
        cache[:3] = float("nan")
    moved = torch.tensor([[5, 3, 4]], dtype=torch.int32)
    for cache, expected in zip(caches, want, strict=True):
        assert torch.equal(attend(backend, case, cache, moved), expected)
    backend.copy_blocks(caches, [])


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_write_touches_only_its_slots(cpu_backend: Prepared, dtype: torch.dtype) -> None:
    backend = cpu_backend("auto")
    cache = torch.zeros(backend.kv_cache_shape(4, 16, 2, 80), dtype=dtype)
    k = torch.ones(5, 2, 80, dtype=dtype)
    backend.write_kv(k, k * 2, cache, torch.tensor([17, -1, 63, 0, -1]))
    assert cache[:, 0].sum() == 3 * 2 * 80
    assert cache[:, 1].sum() == 2 * 3 * 2 * 80
    assert cache[2].count_nonzero() == 0


def test_many_tokens_written_by_threads_equal_one_by_one(cpu_backend: Prepared) -> None:
    torch.set_num_threads(2)
    backend = cpu_backend("auto")
    k, v = torch.randn(2, 300, 3, 64).bfloat16()
    slots = torch.randperm(320)[:300]
    together = torch.zeros(backend.kv_cache_shape(20, 16, 3, 64), dtype=torch.bfloat16)
    singly = together.clone()
    backend.write_kv(k, v, together, slots)
    for i in range(300):
        backend.write_kv(k[i : i + 1], v[i : i + 1], singly, slots[i : i + 1])
    assert torch.equal(together, singly)


def test_shared_prefix_blocks_serve_several_sequences(cpu_backend: Prepared) -> None:
    one = Case([(1, 33)])
    three = replace(one, lengths=[(1, 33), (1, 33), (1, 33)])
    tables = torch.tensor([[2, 0, 1], [2, 0, 3], [2, 0, 4]], dtype=torch.int32)
    outputs = []
    for backend in (cpu_backend("auto"), ReferenceBackend()):
        cache = torch.full(backend.kv_cache_shape(5, 16, 2, 64), float("nan"))
        backend.write_kv(*one.prefix(), cache, one.slots(tables, 0, 0, 32))
        outputs.append(attend(backend, three, cache, tables))
    torch.testing.assert_close(outputs[0], outputs[1], rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("bad", [99, -5])
def test_a_block_outside_the_cache_is_refused(cpu_backend: Prepared, bad: int) -> None:
    backend, case = cpu_backend("auto"), Case([(1, 40)])
    cache = torch.zeros(backend.kv_cache_shape(6, 16, 2, 64))
    batch = case.batch(torch.tensor([[0, 1, 2]], dtype=torch.int32))
    q, k, v = case.qkv()
    metadata = backend.build_metadata(replace(batch, block_tables=torch.tensor([[0, bad, 2]], dtype=torch.int32)))
    with pytest.raises(RuntimeError, match="block_tables"):
        backend.forward(q, k, v, torch.empty_like(q), cache, case.layer, metadata)


def test_a_table_that_is_too_short_is_refused(cpu_backend: Prepared) -> None:
    backend, case = cpu_backend("auto"), Case([(1, 40)])
    cache = torch.zeros(backend.kv_cache_shape(6, 16, 2, 64))
    batch = case.batch(torch.tensor([[0, 1, 2]], dtype=torch.int32))
    q, k, v = case.qkv()
    metadata = backend.build_metadata(replace(batch, block_tables=torch.zeros(1, 2, dtype=torch.int32)))
    with pytest.raises(RuntimeError, match="block_tables"):
        backend.forward(q, k, v, torch.empty_like(q), cache, case.layer, metadata)


def test_a_slot_outside_the_cache_is_refused(cpu_backend: Prepared) -> None:
    backend = cpu_backend("auto")
    cache = torch.zeros(backend.kv_cache_shape(2, 16, 1, 64))
    token = torch.zeros(1, 1, 64)
    for slot in (32, -2):
        with pytest.raises(RuntimeError, match="slot_mapping"):
            backend.write_kv(token, token, cache, torch.tensor([slot]))


def test_mismatched_tensors_are_refused(cpu_backend: Prepared) -> None:
    backend, case = cpu_backend("auto"), Case([(1, 1)])
    q, k, v = case.qkv()
    metadata = backend.build_metadata(case.batch(torch.zeros(1, 1, dtype=torch.int32)))
    cache = torch.zeros(backend.kv_cache_shape(1, 16, 2, 64))
    with pytest.raises(RuntimeError, match="dtype"):
        backend.forward(q.bfloat16(), k, v, q.bfloat16(), cache, case.layer, metadata)
    with pytest.raises(RuntimeError, match="last dimension"):
        backend.forward(q.mT.contiguous().mT, k, v, torch.empty(q.shape), cache, case.layer, metadata)
    assert isinstance(metadata, CpuMetadata)
    with pytest.raises(RuntimeError, match="seq_lens"):
        bad = replace(metadata, seq_lens=torch.zeros(1, dtype=torch.int32))
        backend.forward(q, k, v, torch.empty_like(q), cache, case.layer, bad)
    with pytest.raises(RuntimeError, match="copy_blocks"):
        backend.copy_blocks([cache], [(0, 1)])


def test_an_unprepared_backend_says_so() -> None:
    with pytest.raises(RuntimeError, match="prepare"):
        CpuBackend().write_kv(torch.zeros(1), torch.zeros(1), torch.zeros(1), torch.zeros(1))
    with pytest.raises(ValueError, match="avx9"):
        CpuBackend("avx9")  # type: ignore[arg-type]  # the point of the test
