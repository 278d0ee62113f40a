"""Parts of a context: whose a position is, which keys a query sees there, and what merged parts find."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from paged_case import Case

from attention_backends.context import ContextPart, merge_parts
from attention_backends.cpu import ISAS, CpuBackend, Isa
from attention_backends.interface import AttentionBackend, AttentionBatch, AttentionLayer, AttentionSpec
from attention_backends.reference import ReferenceBackend

LENGTHS = [(1, 1), (1, 2), (1, 40), (30, 30), (10, 33), (0, 0), (300, 310), (1, 300)]


@given(st.integers(1, 9), st.integers(1, 5), st.integers(0, 200), st.integers(1, 60), st.booleans())
def test_a_query_sees_in_each_part_the_keys_that_brute_force_finds(
    size: int, block: int, position: int, reach: int, chunked: bool
) -> None:
    oldest = position // reach * reach if chunked else max(0, position - reach + 1)
    seen = []
    for rank in range(size):
        part = ContextPart(size, rank)
        first, end = part.before(oldest), part.before(position + 1)
        own = [p for p in range(position + 1) if p % size == rank]
        assert own[first:end] == [p for p in own if p >= oldest]
        assert end == len(own)
        seen += own[first:end]
    assert sorted(seen) == list(range(oldest, position + 1))
    slot = 7 * block * size + position % (block * size)  # block 7 of all parts together
    slots = [int(ContextPart(size, rank).slots(torch.tensor([slot]))) for rank in range(size)]
    assert slots == [7 * block + position // size % block if rank == slot % size else -1 for rank in range(size)]
    assert ContextPart(size, size - 1).slots(torch.tensor([-1])).tolist() == [-1]


def in_parts(case: Case, size: int, backend: AttentionBackend, dtype: torch.dtype) -> torch.Tensor:
    """What parts of a case find with inputs of `dtype`, each in a cache of its own, merged: float32."""
    tables = case.block_tables()
    k, v = (x.to(dtype) for x in case.prefix())
    q, new_k, new_v = (x.to(dtype) for x in case.qkv())
    cached = [case.slots(tables, i, 0, n - queries) for i, (queries, n) in enumerate(case.lengths)]
    found = []
    for rank in range(size):
        part = ContextPart(size, rank)
        whole = case.batch(tables)
        batch = replace(
            whole, slot_mapping=part.slots(whole.slot_mapping), block_size=case.block_size // size, context=part
        )
        shape = backend.kv_cache_shape(case.num_blocks, batch.block_size, case.num_kv_heads, case.head_dim)
        # scales of all ones are NaN
        nothing = -1 if case.kv_dtype == torch.int8 else torch.nan
        cache = torch.full(shape, nothing, dtype=case.kv_dtype or dtype)
        backend.write_kv(k, v, cache, part.slots(torch.cat(cached)))
        out = torch.full((*q.shape[:2], q.size(2) + 1), 7.0)
        layer = replace(case.layer, sinks=None)
        backend.forward(q, new_k, new_v, out, cache, layer, backend.build_metadata(batch))
        assert (out[case.num_tokens :] == 7.0).all()
        found.append(out[: case.num_tokens])
    merged = torch.empty(case.num_tokens, *q.shape[1:])
    backend.merge_parts(torch.stack(found, dim=1), merged, case.layer.sinks)
    return merged


@pytest.mark.parametrize("size", [2, 4])
@pytest.mark.parametrize(
    "changes",
    [{}, {"window": 1}, {"window": 7}, {"chunk": 16}, {"soft_cap": 5.0, "spread": 9.0}, {"sinks": True, "window": 3}],
    ids=str,
)
def test_merged_parts_find_what_the_whole_finds(changes: dict[str, Any], size: int) -> None:
    case = Case(LENGTHS, num_heads=6, num_kv_heads=3, head_dim=8, block_size=8, **changes)
    whole = case.run(ReferenceBackend(), torch.float64)
    torch.testing.assert_close(
        in_parts(case, size, ReferenceBackend(), torch.float64), whole.float(), rtol=1e-5, atol=1e-5
    )


# parts of several splits, rows of several tiles, and rows that some of the parts show nothing
MANY = [(1, 1), (1, 2), (3, 3), (0, 5), (1, 1100), (1, 900), (150, 1300), (5, 1030), (40, 90), (1, 513)]
ROUNDED = {torch.float32: 1e-5, torch.bfloat16: 2**-7, torch.float16: 2**-10}


@pytest.mark.parametrize("isa", ISAS[1:])
@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"window": 1},
        {"window": 21, "soft_cap": 20.0},
        {"window": 600, "sinks": True},
        {"chunk": 256},
        {"kv_dtype": torch.int8, "dtype": torch.bfloat16},
        {"dtype": torch.bfloat16, "num_heads": 8, "num_kv_heads": 1, "head_dim": 40},
    ],
    ids=str,
)
def test_kernels_find_in_parts_what_the_equation_says(
    cpu_backend: Callable[[Isa], CpuBackend], isa: Isa, changes: dict[str, Any]
) -> None:
    for size in (2, 3):
        case = Case(MANY, block_size=16 * size, **changes)
        backend = cpu_backend(isa)
        kv_dtype = case.kv_dtype or case.dtype
        backend.bind(AttentionSpec(torch.device("cpu"), case.dtype, kv_dtype, (case.head_dim,)))
        want = case.run(ReferenceBackend(), torch.float64).float()
        try:
            got = in_parts(case, size, backend, case.dtype)
        finally:  # others have this backend, too
            backend.bind(AttentionSpec(torch.device("cpu"), case.dtype, case.dtype, (case.head_dim,)))
        torch.testing.assert_close(got, want, rtol=ROUNDED[case.dtype], atol=ROUNDED[case.dtype])


@pytest.mark.parametrize("rank", [0, 1, 2])
def test_sequences_that_share_a_prefix_find_in_a_part_what_each_finds_alone(
    cpu_backend: Callable[[Isa], CpuBackend], rank: int
) -> None:
    """The part has two whole splits of the prefix, whose keys are read once for all of them."""
    backend, part, block, lengths = cpu_backend("auto"), ContextPart(3, rank), 16, [1620, 1627, 1633]
    layer = AttentionLayer(4, 2, 32, 32**-0.5, None, None)
    generator = torch.Generator().manual_seed(0)
    prefix = 1600 // (block * part.size)  # blocks
    tables = torch.stack([torch.cat((torch.arange(prefix), torch.arange(2) + 100 + 2 * i)) for i in range(3)]).int()
    cache = torch.zeros(backend.kv_cache_shape(106, block, 2, 32))
    k, v = torch.randn((2, 106 * block, 2, 32), generator=generator)
    backend.write_kv(k, v, cache, torch.arange(106 * block))
    dense = torch.stack((k, v), dim=1).view(106, block, 2, 2, 32).transpose(1, 2).contiguous()
    q = torch.randn((3, 4, 32), generator=generator)

    def run(on: AttentionBackend, kv_cache: torch.Tensor, which: list[int]) -> torch.Tensor:
        count = len(which)
        batch = AttentionBatch(
            num_seqs=count,
            num_tokens=count,
            max_query_len=1,
            max_seq_len=max(lengths),
            query_start_loc=torch.arange(count + 1, dtype=torch.int32),
            seq_lens=torch.tensor([lengths[i] for i in which], dtype=torch.int32),
            block_tables=tables[which].contiguous(),
            slot_mapping=torch.full((count,), -1),
            block_size=block,
            num_decodes=count,
            query_lens_host=[1] * count,
            seq_lens_host=[lengths[i] for i in which],
            context=part,
        )
        out, rows = torch.empty(count, 4, 33), q[which]
        on.forward(rows, rows[:, :2], rows[:, :2], out, kv_cache, layer, on.build_metadata(batch))
        return out

    together = run(backend, cache, [0, 1, 2])
    for i in range(3):
        assert torch.equal(together[i], run(backend, cache, [i])[0])
    torch.testing.assert_close(together, run(ReferenceBackend(), dense, [0, 1, 2]), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("isa", [None, *ISAS[1:]])
def test_a_part_that_sees_nothing_counts_nothing_and_makes_no_nan(
    cpu_backend: Callable[[Isa], CpuBackend], isa: Isa | None
) -> None:
    backend = ReferenceBackend() if isa is None else cpu_backend(isa)
    found = torch.tensor([[[[3.0, 4.0, -500.0]], [[0.0, 0.0, -torch.inf]]]])
    nothing = torch.tensor([0.0, 0.0, -torch.inf]).expand(1, 2, 1, 3).contiguous()

    def merged(parts: torch.Tensor, sinks: torch.Tensor | None = None) -> list[float]:
        out = torch.full((1, 1, 2), 7.0)
        backend.merge_parts(parts, out, sinks)
        return out.flatten().tolist()

    assert merged(found) == [3.0, 4.0]
    assert merged(nothing) == merged(nothing, torch.tensor([-3.0])) == [0.0, 0.0]


@pytest.mark.parametrize("isa", ISAS[1:])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_kernels_merge_as_plain_torch_does(
    cpu_backend: Callable[[Isa], CpuBackend], isa: Isa, dtype: torch.dtype
) -> None:
    generator = torch.Generator().manual_seed(2)
    found = torch.randn(37, 3, 5, 41, generator=generator)
    found[..., -1] *= 20
    found[found[..., -1] > 25] = torch.tensor([*[0.0] * 40, -torch.inf])
    for sinks in (None, torch.randn(5, generator=generator) * 9):
        rows = torch.full((37, 6, 40), 7.0, dtype=dtype)
        cpu_backend(isa).merge_parts(found, rows[:, 1:], sinks)
        want = merge_parts(found, sinks)
        torch.testing.assert_close(rows[:, 1:].float(), want, rtol=ROUNDED[dtype], atol=ROUNDED[dtype])
        assert (rows[:, 0] == 7.0).all()
