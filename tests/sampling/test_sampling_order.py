"""Prefixes of the order equal a stable sort's, ties and all."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from engine.sampling.order import order_keys, prefix_mask, row_argmax, top_ids


def rows_with_ties(rng: np.random.Generator, m: int, vocab: int, levels: int) -> np.ndarray:
    x = rng.integers(-levels, levels + 1, (m, vocab)).astype(np.float32) * 0.25
    x[rng.random((m, vocab)) < 0.02] = -0.0
    x[rng.random((m, vocab)) < 0.05] = -np.inf
    return x


@pytest.mark.parametrize(("vocab", "k"), [(5, 5), (100, 3), (640, 5), (1000, 7), (999, 31), (8193, 40), (49_152, 1024)])
@pytest.mark.parametrize("levels", [1, 20, 100_000])
def test_top_ids_are_the_head_of_a_stable_sort(vocab: int, k: int, levels: int) -> None:
    x = rows_with_ties(np.random.default_rng(vocab + k), 3, vocab, levels)
    want = np.argsort(-x, axis=1, kind="stable")[:, :k]
    assert np.array_equal(top_ids(torch.from_numpy(x), k).numpy(), want)


@pytest.mark.parametrize("nan", [float("nan"), -float("nan")])
def test_top_ids_of_a_nan_row_stay_inside_the_vocabulary(nan: float) -> None:
    ids = top_ids(torch.full((2, 1001), nan), 8)
    assert int(ids.min()) >= 0 and int(ids.max()) < 1001


@pytest.mark.parametrize(("m", "vocab"), [(3, 17), (64, 49_152), (9, 131_072), (40, 32_001)])
def test_row_argmax_takes_the_lowest_id_among_equals_and_shows_nan(m: int, vocab: int) -> None:
    rng = np.random.default_rng(m)
    x = rows_with_ties(rng, m, vocab, 3)
    maxima, ids = row_argmax(torch.from_numpy(x))
    assert np.array_equal(ids.numpy(), x.argmax(1))
    assert np.array_equal(maxima.numpy(), x.max(1))
    x[1, vocab // 2] = np.nan
    maxima, ids = row_argmax(torch.from_numpy(x))
    assert maxima.isnan().tolist() == [i == 1 for i in range(m)]
    assert 0 <= int(ids[1]) < vocab


@given(st.integers(0, 2**32 - 1), st.integers(1, 300), st.sampled_from([1, 3, 50, 10**6]), st.floats(0, 1.2))
def test_prefix_mask_is_the_shortest_prefix_that_reaches_the_target(
    seed: int, vocab: int, levels: int, p: float
) -> None:
    rng = np.random.default_rng(seed)
    x = rows_with_ties(rng, 2, vocab, levels)
    # mass depends on the value alone, as a probability does, and may vanish in the tail
    top = np.maximum(x.max(1, keepdims=True), -1e6)
    mass = np.floor(np.exp2(np.clip(x - top, -80, 0)) * 2.0**40).astype(np.int64)
    mass[:, 0] = np.maximum(mass[:, 0], x[:, 0] == x.max(1))  # a row of -inf alone: faulty, but must not break
    total = mass.sum(1)
    target = np.maximum(1, np.ceil(total * p)).astype(np.int64)
    got = prefix_mask(order_keys(torch.from_numpy(x)), torch.from_numpy(mass), torch.from_numpy(target)).numpy()
    for row in range(2):
        order = np.argsort(-x[row], kind="stable")
        before = np.cumsum(mass[row][order]) - mass[row][order]
        want = before < min(target[row], total[row])
        assert set(np.flatnonzero(got[row])) == set(order[want])


def test_prefix_mask_counts_with_unit_masses() -> None:
    x = torch.randn(4, 5000, generator=torch.Generator().manual_seed(3)).round(decimals=1)
    target = torch.tensor([1, 17, 2500, 5000])
    got = prefix_mask(order_keys(x), torch.ones(4, 5000, dtype=torch.int64), target)
    for row, k in enumerate(target.tolist()):
        want = np.argsort(-x[row].numpy(), kind="stable")[:k]
        assert set(got[row].nonzero().squeeze(1).tolist()) == set(want.tolist())
