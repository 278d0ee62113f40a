"""Parts of a context: whose a position is, which keys a query sees there, and what merged parts find."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from paged_case import Case

from attention_backends.context import ContextPart, merge_parts
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


def in_parts(case: Case, size: int) -> torch.Tensor:
    """What parts of a case find, each in a cache of its own, merged."""
    backend, tables = ReferenceBackend(), case.block_tables()
    k, v = (x.double() for x in case.prefix())
    q, new_k, new_v = (x.double() for x in case.qkv())
    cached = [case.slots(tables, i, 0, n - queries) for i, (queries, n) in enumerate(case.lengths)]
    found, sums = [], []
    for rank in range(size):
        part = ContextPart(size, rank)
        whole = case.batch(tables)
        batch = replace(
            whole, slot_mapping=part.slots(whole.slot_mapping), block_size=case.block_size // size, context=part
        )
        shape = backend.kv_cache_shape(case.num_blocks, batch.block_size, case.num_kv_heads, case.head_dim)
        cache = torch.full(shape, torch.nan, dtype=torch.float64)
        backend.write_kv(k, v, cache, part.slots(torch.cat(cached)))
        out, lse = torch.full(q.shape, 7.0), torch.full(q.shape[:2], 7.0)
        layer = replace(case.layer, sinks=None)
        backend.forward_part(q, new_k, new_v, out, lse, cache, layer, backend.build_metadata(batch))
        assert (out[case.num_tokens :] == 7.0).all() and (lse[case.num_tokens :] == 7.0).all()
        found.append(out[: case.num_tokens])
        sums.append(lse[: case.num_tokens])
    return merge_parts(torch.stack(found, dim=1), torch.stack(sums, dim=1), case.layer.sinks)


@pytest.mark.parametrize("size", [1, 2, 4])
@pytest.mark.parametrize(
    "changes",
    [{}, {"window": 1}, {"window": 7}, {"chunk": 16}, {"soft_cap": 5.0, "spread": 9.0}, {"sinks": True, "window": 3}],
    ids=str,
)
def test_merged_parts_find_what_the_whole_finds(changes: dict[str, Any], size: int) -> None:
    case = Case(LENGTHS, num_heads=6, num_kv_heads=3, head_dim=8, block_size=8, **changes)
    whole = case.run(ReferenceBackend(), torch.float64)
    torch.testing.assert_close(in_parts(case, size), whole.float(), rtol=1e-5, atol=1e-5)


def test_a_part_that_sees_nothing_counts_nothing_and_makes_no_nan() -> None:
    out = torch.tensor([[[[3.0, 4.0]], [[0.0, 0.0]]]])
    lse = torch.tensor([[[-500.0], [-torch.inf]]])
    assert torch.equal(merge_parts(out, lse), out[:, 0])
    assert torch.equal(merge_parts(out * 0, lse - torch.inf), out[:, 0] * 0)
    assert torch.equal(merge_parts(out * 0, lse - torch.inf, torch.tensor([-3.0])), out[:, 0] * 0)
