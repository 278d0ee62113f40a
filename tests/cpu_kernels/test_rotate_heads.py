"""Rotated heads are the float64 rotation rounded once, after the layers' own norm; all else stays as it was."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import dataclass, replace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from engine.cpu_kernels.linear import LinearOps
from engine.models.decoder_layer import _rotate
from engine.models.layers import RMSNorm, WideRMSNorm
from engine.models.packed import HeadRotation, RowNorm

ROWS = [1, 2, 3, 7, 33, 130, 301]
DIMS = [16, 64, 80, 128]
ODD_DIMS = [2, 6, 18, 50]
"""halves that fill no vector of any width"""
EPS = 1e-6


@dataclass(frozen=True)
class Case:
    rows: int
    dim: int
    q_heads: int = 5
    k_heads: int = 3
    rest: int = 0
    """columns behind the heads that are rotated; 0: as many as k_heads heads have"""
    norms: bool = False
    gap: int = 0
    """elements between two rows, of x and of rope"""
    passing: int = 0
    """elements of a head that no angle turns"""

    @property
    def turned(self) -> int:
        return self.dim - self.passing

    @property
    def rotated(self) -> int:
        return (self.q_heads + self.k_heads) * self.dim

    @property
    def columns(self) -> int:
        return self.rotated + (self.rest or self.k_heads * self.dim)

    def x(self) -> Tensor:
        return rand(self.rows, self.columns + self.gap)[:, self.gap :]

    def rope(self) -> Tensor:
        angles = torch.rand(self.rows, self.turned // 2, generator=torch.Generator().manual_seed(self.dim)) * 7
        table = torch.cat((angles.cos(), angles.sin(), torch.zeros(self.rows, self.gap)), dim=1).bfloat16()
        return table[:, : self.turned]

    def weights(self) -> tuple[Tensor, Tensor] | None:
        return (rand(self.dim, seed=1) + 1, rand(self.dim, seed=2) - 1) if self.norms else None


def rand(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed + sum(shape))).bfloat16()


def rotate(ops: LinearOps, case: Case, x: Tensor | None = None) -> Tensor:
    q_norm, k_norm = case.weights() or (None, None)
    x = case.x() if x is None else x
    result: Tensor = ops.rotate_heads(x, case.rope(), q_norm, k_norm, EPS, case.q_heads, case.k_heads, case.dim, None)
    return result


def norm_of(weight: Tensor, kind: type[RMSNorm] = RMSNorm) -> RMSNorm:
    norm = kind(len(weight), EPS, torch.bfloat16, torch.device("cpu"))
    with torch.no_grad():
        norm.weight.copy_(weight)
    return norm


def normed_heads(case: Case) -> Tensor:
    """bf16 [rows, heads, dim]: what is to be rotated."""
    heads = case.x()[:, : case.rotated].reshape(case.rows, -1, case.dim)
    weights = case.weights()
    if weights is None:
        return heads
    split = torch.split(heads, [case.q_heads, case.k_heads], dim=1)
    normed: list[Tensor] = [norm_of(weight)(part) for weight, part in zip(weights, split, strict=True)]
    return torch.cat(normed, dim=1)


def assert_rotated(found: Tensor, case: Case) -> None:
    heads, rope, x = normed_heads(case).double(), case.rope().double(), case.x()
    turned, passing = heads.split([case.turned, case.passing], dim=-1)
    truth = torch.cat((_rotate(turned, rope), passing), dim=-1).flatten(1)
    cos, sin = rope.abs()[:, None].chunk(2, dim=-1)
    first, second = turned.abs().chunk(2, dim=-1)
    parts = (first * cos + second * sin, second * cos + first * sin, passing.abs())
    magnitude = torch.cat(parts, dim=-1).flatten(1)
    assert found.dtype == torch.bfloat16 and found.shape == x.shape and found.is_contiguous()
    error = (found[:, : case.rotated].double() - truth).abs()
    once = truth.abs() * 2.0**-8 + magnitude * 2.0**-22
    if case.norms:  # a sum in another order may round a normalised element, and then its product, to the next value
        assert bool((error <= once + magnitude * 2.0**-6).all())
        assert (error <= once).double().mean() > 0.97
    else:
        assert bool((error <= once).all())
    assert torch.equal(bits(found[:, case.rotated :]), bits(x[:, case.rotated :]))


def assert_nearly_equal(found: Tensor, expected: Tensor) -> None:
    """A sum in another order may round a normalised element, and then its product, to the next value."""
    torch.testing.assert_close(found, expected, rtol=2.0**-6, atol=1e-30)
    assert (found == expected).double().mean() > 0.97


def bits(x: Tensor) -> Tensor:
    return x.contiguous().view(torch.int16)


@pytest.fixture(scope="session")
def ops(linear_ops: LinearOps) -> LinearOps:
    return linear_ops


@pytest.fixture
def threads() -> Iterator[list[int]]:
    before = torch.get_num_threads()
    yield [1, 2, 3, 5, 64]
    torch.set_num_threads(before)


@pytest.mark.parametrize("norms", [False, True], ids=["plain", "norms"])
@pytest.mark.parametrize("dim", DIMS + ODD_DIMS)
def test_heads_are_the_float64_rotation_rounded_once(ops: LinearOps, dim: int, norms: bool) -> None:
    for rows in ROWS:
        case = Case(rows, dim, norms=norms)
        assert_rotated(rotate(ops, case), case)


@pytest.mark.parametrize("norms", [False, True], ids=["plain", "norms"])
@pytest.mark.parametrize(("dim", "passing"), [(64, 32), (128, 32), (80, 48), (64, 62), (16, 2)])
def test_elements_that_no_angle_turns_pass_through(ops: LinearOps, dim: int, passing: int, norms: bool) -> None:
    for rows in ROWS:
        case = Case(rows, dim, norms=norms, passing=passing)
        found = rotate(ops, case)
        assert_rotated(found, case)
        if not norms:
            heads = [t[:, : case.rotated].unflatten(1, (-1, dim))[..., -passing:] for t in (found, case.x())]
            assert torch.equal(bits(heads[0]), bits(heads[1]))


@pytest.mark.parametrize("norms", [False, True], ids=["plain", "norms"])
@pytest.mark.parametrize("dim", DIMS)
def test_any_number_of_threads_gives_the_same_bits(ops: LinearOps, threads: list[int], dim: int, norms: bool) -> None:
    for rows in ROWS:
        found = []
        for count in threads:
            torch.set_num_threads(count)
            found += [rotate(ops, Case(rows, dim, norms=norms)) for _ in range(3)]
        assert all(torch.equal(bits(found[0]), bits(other)) for other in found)


@pytest.mark.parametrize("norms", [False, True], ids=["plain", "norms"])
def test_a_row_has_the_same_bits_alone_and_in_any_batch(ops: LinearOps, threads: list[int], norms: bool) -> None:
    torch.set_num_threads(3)
    case = Case(301, 80, norms=norms)
    x, rope, found = case.x(), case.rope(), rotate(ops, case)
    weights = case.weights() or (None, None)
    for row in (0, 1, 150, 300):
        alone = ops.rotate_heads(
            x[row : row + 1], rope[row : row + 1], *weights, EPS, case.q_heads, case.k_heads, case.dim, None
        )
        assert torch.equal(bits(alone), bits(found[row : row + 1]))


@given(
    rows=st.integers(1, 90),
    half=st.integers(1, 70),
    q_heads=st.integers(0, 4),
    k_heads=st.integers(0, 3),
    rest=st.integers(1, 100),
    gap=st.integers(0, 9),
    norms=st.booleans(),
    passing=st.integers(0, 69),
)
def test_any_shape_and_any_row_stride(
    ops: LinearOps, rows: int, half: int, q_heads: int, k_heads: int, rest: int, gap: int, norms: bool, passing: int
) -> None:
    # norms of heads of few elements multiply rounding by whatever 1 / rms is: the strict test has dims that models have
    passing = 2 * min(passing, half - 1)
    case = Case(rows, 2 * half, q_heads, k_heads, rest, norms and half > 4, gap, passing)
    found = rotate(ops, case)
    if not case.rotated:
        assert torch.equal(found, case.x())
    else:
        assert_rotated(found, case)


def test_rows_may_be_one_row_seen_often(ops: LinearOps) -> None:
    case = Case(1, 64, norms=True)
    q_norm, k_norm = case.weights() or (None, None)
    x, rope = case.x().expand(40, -1), case.rope().expand(40, -1)
    found = ops.rotate_heads(x, rope, q_norm, k_norm, EPS, case.q_heads, case.k_heads, case.dim, None)
    assert torch.equal(found, rotate(ops, case).expand(40, -1))


def test_no_rows_are_no_rows(ops: LinearOps) -> None:
    assert rotate(ops, Case(0, 64, norms=True)).shape == (0, Case(0, 64).columns)


@pytest.mark.parametrize("norms", [False, True], ids=["plain", "norms"])
def test_nan_and_infinity_stay_in_their_head(ops: LinearOps, norms: bool) -> None:
    case = Case(40, 64, norms=norms)
    clean = rotate(ops, case)
    for value in (float("nan"), float("inf")):
        broken = case.x().clone()
        broken[3, 64 + 5] = value
        broken[3, case.rotated + 1] = value
        found = rotate(ops, case, broken)
        assert not found[3, [64 + 5, 64 + 5 + 32]].isfinite().any()
        elsewhere = torch.ones_like(found, dtype=torch.bool)
        elsewhere[3, 64:128] = False
        elsewhere[3, case.rotated + 1] = False
        assert torch.equal(found[elsewhere], clean[elsewhere])
        assert torch.equal(bits(found[:, case.rotated :]), bits(broken[:, case.rotated :]))


def test_an_angle_of_zero_changes_nothing(ops: LinearOps) -> None:
    case = Case(33, 80)
    rope = torch.cat((torch.ones(33, 40), torch.zeros(33, 40)), dim=1).bfloat16()
    found = ops.rotate_heads(case.x(), rope, None, None, 0.0, case.q_heads, case.k_heads, case.dim, None)
    assert torch.equal(found, case.x())


@pytest.mark.parametrize("norms", [False, True], ids=["plain", "norms"])
def test_without_a_rope_heads_are_only_normed(ops: LinearOps, threads: list[int], norms: bool) -> None:
    for rows, dim in itertools.product((1, 7, 301), (16, 80, 50)):
        case = Case(rows, dim, norms=norms)
        weights, x = case.weights() or (None, None), case.x()
        expected = torch.cat((normed_heads(case).flatten(1), x[:, case.rotated :]), dim=1)
        for count in threads[:3]:
            torch.set_num_threads(count)
            found = ops.rotate_heads(x, None, *weights, EPS, case.q_heads, case.k_heads, dim, None)
            if norms:
                assert_nearly_equal(found, expected)
                assert torch.equal(found[:, case.rotated :], x[:, case.rotated :])
            else:
                assert torch.equal(bits(found), bits(x))


@pytest.mark.parametrize("kind", [RMSNorm, WideRMSNorm])
@pytest.mark.parametrize("hidden", [64, 576, 2050])
def test_a_row_norm_is_the_layers_norm(ops: LinearOps, threads: list[int], hidden: int, kind: type[RMSNorm]) -> None:
    norm, module = norm_of(rand(hidden) + 1, kind), RowNorm(ops)
    for rows in (1, 9, 130):
        x = rand(rows, hidden + 3)[:, 3:]
        found = module(x, norm)
        assert_nearly_equal(found, norm(x))
        torch.set_num_threads(3)
        assert torch.equal(module(x, norm), found)
        residual = rand(rows, hidden + 1)[:, :-1]
        assert torch.equal(module(x, norm, residual), residual + found)


@pytest.mark.parametrize("norms", [False, True], ids=["plain", "norms"])
def test_the_module_gives_the_operator_its_norms(ops: LinearOps, norms: bool) -> None:
    case = Case(7, 64, norms=norms)
    weights = case.weights()
    q_norm, k_norm = (None, None) if weights is None else (norm_of(weights[0]), norm_of(weights[1]))
    module = HeadRotation(ops, case.q_heads, case.k_heads, case.dim)
    assert torch.equal(module(case.x(), case.rope(), q_norm, k_norm), rotate(ops, case))


def test_the_fake_tells_shape_dtype_and_strides(ops: LinearOps) -> None:
    for case in (Case(5, 64), replace(Case(5, 64, norms=True), gap=3)):
        weights = case.weights() or (None, None)
        arguments = (case.x(), case.rope(), *weights, EPS, case.q_heads, case.k_heads, case.dim, None)
        torch.library.opcheck(ops.rotate_heads, arguments, test_utils=("test_schema", "test_faketensor"))


def test_what_does_not_fit_is_refused(ops: LinearOps) -> None:
    case = Case(3, 64, norms=True)
    q_norm, k_norm = case.weights() or (None, None)
    columns = case.columns
    fitting = {"x": case.x(), "rope": case.rope(), "q_norm": q_norm, "k_norm": k_norm, "eps": EPS}
    fitting |= {"q_heads": case.q_heads, "k_heads": case.k_heads, "dim": case.dim, "residual": None}
    refused: list[tuple[str, dict[str, object]]] = [
        ("x must have two dimensions", {"x": case.x()[0]}),
        ("x must have two dimensions", {"x": case.x()[None]}),
        (rf"x must be bfloat16 \[rows, {columns}\]", {"x": case.x().float()}),
        ("x must be", {"x": rand(columns, 3).T}),
        ("x must be", {"x": rand(3, 2 * columns)[:, ::2]}),
        (r"rope must be bfloat16 \[rows, 64\]", {"rope": case.rope().float()}),
        ("63 elements of heads of 64", {"rope": case.rope()[:, :63]}),
        ("66 elements of heads of 64", {"rope": rand(3, 66)}),
        ("rope must be", {"rope": case.rope()[:, :0]}),
        ("rope must be", {"rope": rand(64, 3).T}),
        ("rope must be", {"rope": case.rope()[0]}),
        ("rope has 2 rows, x 3", {"rope": case.rope()[:2]}),
        ("both be there, or none", {"q_norm": None}),
        ("both be there, or none", {"k_norm": None}),
        (r"q_norm must be contiguous bfloat16 \[64\]", {"q_norm": rand(32)}),
        ("q_norm must be", {"q_norm": rand(64).double()}),
        (r"q_norm must be contiguous \[64\]", {"q_norm": rand(32).float()}),
        ("differ in dtype", {"q_norm": rand(64).float()}),
        ("a residual is added to rows that are normed as a whole", {"residual": case.x()}),
        ("a residual is added", {"residual": case.x(), "rope": None}),
        ("k_norm must be", {"k_norm": rand(128)[::2]}),
        ("k_norm must be", {"k_norm": rand(1, 64)}),
        ("heads of 63 cannot be rotated in pairs", {"dim": 63}),
        ("heads of 0", {"dim": 0}),
        ("heads of -64", {"dim": -64}),
        (r"-1 \+ 3 heads", {"q_heads": -1}),
        (r"5 \+ -2 heads", {"k_heads": -2}),
        (f"{2**62} \\+ 3 heads", {"q_heads": 2**62}),
        (rf"9 \+ 3 heads of 64 do not fit rows of {columns}", {"q_heads": 9}),
    ]
    ops.rotate_heads(*fitting.values())
    for message, changes in refused:
        with pytest.raises(RuntimeError, match=f"rotate_heads: .*{message}"):
            ops.rotate_heads(*(fitting | changes).values())
