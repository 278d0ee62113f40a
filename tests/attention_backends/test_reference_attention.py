"""The oracle itself, against torch's dense attention."""

from __future__ import annotations

import pytest
import torch
from paged_case import Case

from attention_backends.reference import ReferenceBackend


def dense(case: Case) -> torch.Tensor:
    """scaled_dot_product_attention per sequence over the logical (unpaged) keys, in float64."""
    q, k, v = (x.double() for x in case.qkv())
    past_k, past_v = (x.double() for x in case.prefix())
    outputs, token, past = [], 0, 0
    for queries, length in case.lengths:
        cached = length - queries
        keys = torch.cat([past_k[past : past + cached], k[token : token + queries]]).transpose(0, 1)
        values = torch.cat([past_v[past : past + cached], v[token : token + queries]]).transpose(0, 1)
        distance = torch.arange(cached, length)[:, None] - torch.arange(length)[None, :]
        mask = (distance >= 0) & (distance < (case.window or length + 1))
        attended = torch.nn.functional.scaled_dot_product_attention(
            q[token : token + queries].transpose(0, 1), keys, values, attn_mask=mask, enable_gqa=True
        )
        outputs.append(attended.transpose(0, 1))
        token, past = token + queries, past + cached
    return torch.cat(outputs)


@pytest.mark.parametrize("window", [None, 1, 7, 50])
@pytest.mark.parametrize("heads", [(4, 4), (9, 3), (8, 1)], ids=str)
@pytest.mark.parametrize("block_size", [1, 8, 16])
def test_reference_is_dense_attention(heads: tuple[int, int], window: int | None, block_size: int) -> None:
    lengths = [(1, 1), (1, 40), (30, 30), (10, 33), (0, 0), (300, 310)]
    case = Case(lengths, num_heads=heads[0], num_kv_heads=heads[1], window=window, block_size=block_size)
    torch.testing.assert_close(case.run(ReferenceBackend(), torch.float64), dense(case), rtol=1e-12, atol=1e-12)


def test_soft_cap_bounds_scores_before_the_softmax() -> None:
    case = Case([(1, 2)], num_heads=1, num_kv_heads=1, head_dim=8, soft_cap=2.0, spread=50.0)
    q, k, v = (x.double() for x in case.qkv())
    past_k, past_v = (x.double() for x in case.prefix())
    keys, values = torch.cat([past_k[:, 0], k[:1, 0]]), torch.cat([past_v[:, 0], v[:1, 0]])
    scores = 2.0 * torch.tanh(keys @ q[0, 0] * 8**-0.5 / 2.0)
    want = torch.softmax(scores, 0) @ values
    torch.testing.assert_close(case.run(ReferenceBackend(), torch.float64)[0, 0], want, rtol=1e-12, atol=1e-12)


def test_reference_copies_blocks_in_every_cache() -> None:
    caches = [torch.randn(4, 2, 8, 1, 8) for _ in range(2)]
    before = [cache.clone() for cache in caches]
    ReferenceBackend().copy_blocks(caches, [(0, 3)])
    for cache, old in zip(caches, before, strict=True):
        assert torch.equal(cache[3], old[0])
        assert torch.equal(cache[:3], old[:3])
