"""Routing against sorting in Python: which experts, in which order, with what factors; ties, extremes, refusals."""

from __future__ import annotations

import ctypes
import math

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from engine.cpu_kernels.experts import Routing
from engine.cpu_kernels.linear import LinearOps

_EXTREMES = [float(np.float32(x)) for x in (-math.inf, -3e38, -104, -88, -1e-30, -0.0, 0, 1e-30, 88, 104, 3e38)]
_TIED = st.sampled_from([-1.0, 0.0, 0.5, 0.5, 2.0])
_ANY = st.one_of(st.floats(-20, 20, width=32), st.sampled_from(_EXTREMES))
_expf = ctypes.CDLL("libm.so.6").expf
_expf.argtypes, _expf.restype = [ctypes.c_float], ctypes.c_float


def _route(
    ops: LinearOps,
    logits: list[list[float]],
    kind: Routing,
    top_k: int,
    normalise: bool = True,
    bias: list[float] | None = None,
    groups: int = 1,
    top_groups: int = 1,
    scale: float = 1.0,
) -> tuple[list[list[int]], torch.Tensor]:
    given_bias = None if bias is None else torch.tensor(bias, dtype=torch.float32)
    ids, weights = ops.route(
        torch.tensor(logits, dtype=torch.float32), int(kind), top_k, normalise, given_bias, groups, top_groups, scale
    )
    assert ids.dtype == torch.int32 and weights.dtype == torch.float32
    return ids.tolist(), weights


def _best(scores: list[float], count: int) -> list[int]:
    return sorted(range(len(scores)), key=lambda i: (-scores[i], i))[:count]


@st.composite
def _logits(draw: st.DrawFn) -> tuple[list[list[float]], int]:
    experts = draw(st.integers(1, 40))
    row = st.lists(draw(st.sampled_from([_TIED, _ANY])), min_size=experts, max_size=experts)
    return draw(st.lists(row, min_size=1, max_size=4)), draw(st.integers(1, experts))


@given(case=_logits(), normalise=st.booleans(), scale=st.sampled_from([1.0, 2.5]))
def test_softmax_takes_the_best_and_ties_go_by_index(
    linear_ops: LinearOps, case: tuple[list[list[float]], int], normalise: bool, scale: float
) -> None:
    logits, top_k = case
    for kind in (Routing.SOFTMAX, Routing.CHOSEN_SOFTMAX):
        ids, weights = _route(linear_ops, logits, kind, top_k, normalise, scale=scale)
        for row, chosen, found in zip(logits, ids, weights):
            assert chosen == _best(row, top_k)
            wide = torch.tensor(row, dtype=torch.float64)
            if all(x == -math.inf for x in row):
                wide = torch.zeros_like(wide)  # all are equal
            if kind is Routing.SOFTMAX and not normalise:
                expected = wide.softmax(0)[chosen]
            else:
                expected = wide[chosen].softmax(0)
            torch.testing.assert_close(found.double(), expected * scale, rtol=1e-5, atol=1e-37)


def _sigmoid(x: float) -> np.float32:
    return np.float32(1) / (np.float32(1) + np.float32(_expf(-x)))


@st.composite
def _grouped(draw: st.DrawFn) -> tuple[list[list[float]], list[float], int, int, int]:
    groups, size = draw(st.integers(1, 6)), draw(st.integers(1, 6))
    top_groups = draw(st.integers(1, groups))
    row = st.lists(draw(st.sampled_from([_TIED, _ANY])), min_size=groups * size, max_size=groups * size)
    bias = st.lists(st.sampled_from([-2.0, -0.5, 0.0, 0.0, 0.125, 5.0]), min_size=groups * size, max_size=groups * size)
    logits = draw(st.lists(row, min_size=1, max_size=4))
    return logits, draw(bias), groups, top_groups, draw(st.integers(1, size * top_groups))


@given(case=_grouped(), normalise=st.booleans())
def test_sigmoid_scores_in_groups(
    linear_ops: LinearOps, case: tuple[list[list[float]], list[float], int, int, int], normalise: bool
) -> None:
    logits, bias, groups, top_groups, top_k = case
    ids, weights = _route(linear_ops, logits, Routing.SIGMOID, top_k, normalise, bias, groups, top_groups, 2.5)
    size = len(bias) // groups
    with np.errstate(over="ignore"):
        for row, chosen, found in zip(logits, ids, weights):
            scores = [_sigmoid(x) for x in row]
            by = [float(score + np.float32(b)) for score, b in zip(scores, bias)]
            parts = [sorted(by[g * size : (g + 1) * size], reverse=True)[:2] for g in range(groups)]
            sums = [float(np.float32(sum(part))) for part in parts]
            kept = _best(sums, top_groups)
            assert chosen == _best([x if i // size in kept else -math.inf for i, x in enumerate(by)], top_k)
            factors = torch.tensor([float(scores[i]) for i in chosen], dtype=torch.float64)
            expected = factors / (factors.sum() + 1e-20) if normalise else factors
            torch.testing.assert_close(found.double(), expected * 2.5, rtol=1e-5, atol=1e-37)


def test_deepseeks_example_by_hand(linear_ops: LinearOps) -> None:
    """Two groups of three. The best expert is alone in its group; the other group has the better two."""
    logits = [[4.0, -9.0, -9.0, 1.0, 2.0, -9.0]]
    ids, weights = _route(linear_ops, logits, Routing.SIGMOID, 2, groups=2, top_groups=1)
    assert ids == [[4, 3]]
    scores = torch.tensor([2.0, 1.0], dtype=torch.float64).sigmoid()
    torch.testing.assert_close(weights[0].double(), scores / scores.sum(), rtol=1e-6, atol=0)
    # a bias chooses and does not weigh
    ids, weights = _route(linear_ops, logits, Routing.SIGMOID, 2, False, [1.0, 0, 0, 0, 0, 0], 2, 1)
    assert ids[0][0] == 0
    assert weights[0, 0].item() == pytest.approx(torch.tensor(4.0).sigmoid().item(), rel=1e-6)


@pytest.mark.parametrize("normalise", [False, True])
def test_a_bias_chooses_by_softmax_and_does_not_weigh(linear_ops: LinearOps, normalise: bool) -> None:
    logits = torch.randn(40, 24, generator=torch.Generator().manual_seed(1))
    bias = torch.rand(24, generator=torch.Generator().manual_seed(2)) * 0.2
    ids, weights = linear_ops.route(logits, int(Routing.SOFTMAX), 4, normalise, bias, 1, 1, 1.5)
    scores = logits.double().softmax(-1)
    expected = (scores + bias).topk(4).indices
    assert torch.equal(ids.long(), expected) and not torch.equal(expected, scores.topk(4).indices)
    factors = scores.gather(1, expected)
    factors = factors / factors.sum(-1, keepdim=True) if normalise else factors
    torch.testing.assert_close(weights.double(), factors * 1.5, rtol=1e-5, atol=0)


def test_nan_is_never_preferred_and_stays_in_its_row(linear_ops: LinearOps) -> None:
    logits = [[0.0, math.nan, 1.0, math.nan], [3.0, 2.0, 1.0, 0.0], [math.nan] * 4]
    for kind in Routing:
        ids, weights = _route(linear_ops, logits, kind, 3)
        assert ids == [[2, 0, 1], [0, 1, 2], [0, 1, 2]]
        assert weights.isnan().all(dim=1).tolist() == [True, False, True]
        assert not bool(weights[1].isnan().any())


def test_many_tokens_on_threads_and_rows_apart(linear_ops: LinearOps) -> None:
    wide = torch.randn(700, 300, generator=torch.Generator().manual_seed(0))
    logits = wide[:, 20:148]
    found = []
    for threads in (1, 2, 5):
        torch.set_num_threads(threads)
        found.append(linear_ops.route(logits, 0, 8, True, None, 1, 1, 1.0))
    expected = logits.topk(8, dim=1).indices
    for ids, weights in found:
        assert torch.equal(ids.long(), expected)
        assert torch.equal(weights, found[0][1])
    assert linear_ops.route(logits[:0], 0, 8, True, None, 1, 1, 1.0)[0].shape == (0, 8)


def test_what_does_not_fit_is_refused(linear_ops: LinearOps) -> None:
    logits = torch.zeros(3, 12)
    given = {
        "logits": logits, "kind": 2, "top_k": 2, "normalise": True, "bias": torch.zeros(12), "groups": 4,
        "top_groups": 2, "scale": 1.0,
    }  # fmt: skip
    linear_ops.route(*given.values())
    refused: list[tuple[str, dict[str, object]]] = [
        ("logits must be", {"logits": logits.double()}),
        ("logits must be", {"logits": logits[0]}),
        ("logits must be", {"logits": logits.T.contiguous().T}),
        ("unknown kind 3", {"kind": 3}),
        ("top_k = 0", {"top_k": 0}),
        ("top_k = 7 of 6", {"top_k": 7}),
        ("do not fall into 5 groups", {"groups": 5}),
        ("do not fall into 0 groups", {"groups": 0}),
        ("of which 5 are chosen", {"top_groups": 5}),
        ("of which 0 are chosen", {"top_groups": 0}),
        ("groups go with sigmoid scores only", {"kind": 0}),
        ("groups go with sigmoid scores only", {"kind": 1, "bias": None}),
        ("a bias goes with scores of all experts", {"kind": 1, "groups": 1, "top_groups": 1}),
        ("bias must be", {"bias": torch.zeros(11)}),
    ]
    for message, changes in refused:
        with pytest.raises(RuntimeError, match=message):
            linear_ops.route(*(given | changes).values())
