"""Packed bf16 layers equal the layers they stand for, on every ISA, for every number of rows, and never mix rows up."""

from __future__ import annotations

import itertools

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from attention_backends.native_build import ISAS
from engine.cpu_kernels.formats import Format
from engine.cpu_kernels.linear import LinearOps, interleave_gate_up, pack_bf16, pack_float32, unpack

BF16, FLOAT32 = int(Format.BFLOAT16), int(Format.FLOAT32)
ROWS = [0, 1, 2, 5, 6, 7, 16, 17, 33, 64, 200]
SHAPES = [(96, 64), (33, 66), (1, 2), (70, 2120), (64, 4128)]
EPS = 1e-5
NORMS = (None, torch.bfloat16, torch.float32)


def rand(*shape: int, scale: float = 1.0, seed: int = 0) -> Tensor:
    generator = torch.Generator().manual_seed(seed + sum(shape))
    return (torch.randn(*shape, generator=generator) * scale).bfloat16()


def call(
    ops: LinearOps,
    isa: str,
    x: Tensor,
    weight: Tensor,
    *,
    bias: Tensor | None = None,
    norm: Tensor | None = None,
    residual: Tensor | None = None,
    gate: int = 0,
    wide: bool = False,
) -> Tensor:
    number = 0 if isa == "auto" else 1 + ISAS.index(isa)
    packed = pack_bf16(weight)
    result: Tensor = ops.packed_linear(x, packed, weight.size(0), BF16, bias, norm, EPS, residual, gate, wide, number)
    return result


def exact(x: Tensor, weight: Tensor) -> Tensor:
    return x.double() @ weight.double().T


def assert_product(found: Tensor, x: Tensor, weight: Tensor) -> None:
    """Within half a unit of bf16 of the float64 product, and what float32 sums of these lengths may lose."""
    truth = exact(x, weight)
    magnitude = x.double().abs() @ weight.double().abs().T
    allowed = truth.abs() * 2.0**-8 + magnitude * 2.0**-20 + 1e-30
    assert found.dtype == torch.bfloat16
    assert bool(((found.double() - truth).abs() <= allowed).all())


@pytest.fixture(scope="session")
def ops(linear_ops: LinearOps) -> LinearOps:
    return linear_ops


@pytest.fixture(params=ISAS)
def isa(request: pytest.FixtureRequest, ops: LinearOps) -> str:
    if request.param not in ops.isas:
        pytest.skip(f"this CPU has no {request.param}")
    name: str = request.param
    return name


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_product_is_the_float64_product_rounded(ops: LinearOps, isa: str, shape: tuple[int, int]) -> None:
    weight = rand(*shape, seed=1)
    for rows in ROWS:
        x = rand(rows, shape[1])
        assert_product(call(ops, isa, x, weight), x, weight)


def test_a_thousand_rows(ops: LinearOps, isa: str) -> None:
    for k in (64, 2112):  # the longer one holds sums of many rows between blocks of inputs
        x, weight = rand(1000, k), rand(96, k)
        assert_product(call(ops, isa, x, weight), x, weight)


def separate_layers(
    x: Tensor, weight: Tensor, bias: Tensor | None, norm: Tensor | None, residual: Tensor | None, gate: int
) -> Tensor:
    """What torch's modules give one after another, the products summed in float64."""
    if norm is not None:
        wide = x.float()
        normed = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + EPS)
        x = norm * normed.bfloat16() if norm.dtype == torch.bfloat16 else (norm * normed).bfloat16()
    product = exact(x, weight)
    y = (product if bias is None else product + bias.double()).bfloat16()
    if gate:
        gates, up = y.chunk(2, dim=-1)
        y = (F.silu(gates) if gate == 1 else F.gelu(gates, approximate="tanh")) * up
    return y if residual is None else residual + y


@pytest.mark.parametrize("rows", [1, 7, 40])
def test_fused_layers_round_where_separate_layers_do(ops: LinearOps, isa: str, rows: int) -> None:
    n, k = 64, 96
    x, weight = rand(rows, k), rand(n, k, scale=k**-0.5)
    either = (False, True)
    for has_bias, norm_dtype, has_residual, gate, wide in itertools.product(either, NORMS, either, (0, 1, 2), either):
        bias = rand(n, seed=2) if has_bias else None
        norm = None if norm_dtype is None else (1 + rand(k, seed=3).float() / 3).to(norm_dtype)
        residual = rand(rows, n // 2 if gate else n, seed=4) if has_residual else None
        truth = separate_layers(x, weight, bias, norm, residual, gate)
        order = interleave_gate_up if gate else torch.clone
        found = call(
            ops,
            isa,
            x,
            order(weight),
            bias=None if bias is None else order(bias),
            norm=norm,
            residual=residual,
            gate=gate,
            wide=wide,
        )
        assert found.dtype == (torch.float32 if wide else torch.bfloat16)
        assert torch.equal(found, found.bfloat16().to(found.dtype))
        # a product that lies at the middle of two bf16 values may go either way: then all that follows moves a unit
        torch.testing.assert_close(found.float(), truth.float(), rtol=2.0**-6, atol=0.02)
        assert (found.float() == truth.float()).float().mean() > 0.9


@given(
    rows=st.integers(1, 70),
    n=st.integers(1, 100),
    pairs=st.integers(1, 90),
    extra=st.integers(0, 7),
    isa_index=st.integers(0, len(ISAS) - 1),
)
def test_any_shape_and_any_row_stride(
    ops: LinearOps, rows: int, n: int, pairs: int, extra: int, isa_index: int
) -> None:
    isa = ISAS[isa_index] if ISAS[isa_index] in ops.isas else "auto"
    k = 2 * pairs
    x, weight = rand(rows, k + extra)[:, extra:], rand(n, k)
    residual = rand(rows, n + extra)[:, :n]
    assert_product(call(ops, isa, x, weight), x, weight)
    added = call(ops, isa, x, weight, residual=residual)
    assert torch.equal(added, residual + call(ops, isa, x, weight))


@pytest.mark.parametrize("k", [64, 98, 2144])
def test_a_row_has_the_same_bits_alone_and_in_any_batch(ops: LinearOps, isa: str, k: int) -> None:
    x, weight, norm = rand(300, k), rand(65, k), rand(k)
    alone = torch.cat([call(ops, isa, x[i : i + 1], weight, norm=norm) for i in range(12)])
    for rows in (12, 13, 31, 65, 300):
        assert torch.equal(call(ops, isa, x[:rows], weight, norm=norm)[:12], alone)


def test_any_number_of_threads_gives_the_same_bits(ops: LinearOps, isa: str) -> None:
    before = torch.get_num_threads()
    weight, norm = rand(320, 512), rand(512)
    try:
        for rows in (1, 40, 300):
            x, found = rand(rows, 512), []
            for threads in (1, 2, 3, 9, 64):
                torch.set_num_threads(threads)
                found += [call(ops, isa, x, weight, norm=norm) for _ in range(3)]
            assert all(torch.equal(found[0], other) for other in found)
    finally:
        torch.set_num_threads(before)


def test_nan_and_infinity_stay_in_their_row(ops: LinearOps, isa: str) -> None:
    weight, norm = rand(65, 96), rand(96)
    for rows in (3, 40):
        x = rand(rows, 96)
        clean = call(ops, isa, x, weight, norm=norm)
        for value in (float("nan"), float("inf")):
            broken = x.clone()
            broken[1, 5] = value
            found = call(ops, isa, broken, weight, norm=norm)
            assert bool(found[1].isnan().all())
            others = torch.arange(rows) != 1
            assert torch.equal(found[others], clean[others])


def test_extreme_gates_neither_overflow_nor_vanish(ops: LinearOps, isa: str) -> None:
    gates = torch.tensor([-3e38, -200.0, -88.0, -20.0, -1e-3, -0.0, 0.0, 1e-3, 20.0, 88.0, 200.0, 3e38]).bfloat16()
    weight = torch.zeros(32, 2, dtype=torch.bfloat16)
    weight[:16, 0], weight[16:, 1] = 1, 1
    x = torch.stack([gates, torch.ones_like(gates)], dim=1)
    found = call(ops, isa, x, weight, gate=1)
    torch.testing.assert_close(found[:, 0], F.silu(gates), rtol=2.0**-7, atol=1e-35)


def test_nothing_is_written_beyond_the_last_output(ops: LinearOps, isa: str) -> None:
    """Rows of 33 outputs lie end to end: a store of a whole panel would spoil the next row's first outputs."""
    x, weight = rand(50, 64), rand(33, 64)
    for _ in range(3):
        for wide in (False, True):
            assert_product(call(ops, isa, x, weight, wide=wide).bfloat16(), x, weight)


@settings(max_examples=settings.default.max_examples // 4)
@given(n=st.integers(1, 100), pairs=st.integers(1, 40), wide=st.booleans())
def test_unpack_inverts_pack(n: int, pairs: int, wide: bool) -> None:
    weight = rand(n, 2 * pairs)
    packed = pack_bf16(weight.float() if wide else weight)
    assert packed.dtype == torch.uint8
    assert torch.equal(unpack(packed, n, 2 * pairs, Format.BFLOAT16), weight.float())


def test_layout_is_the_documented_one() -> None:
    weight = rand(40, 6)
    panels = pack_bf16(weight).view(torch.bfloat16).view(2, 3, 32, 2)
    for output, i in itertools.product(range(40), range(6)):
        assert panels[output // 32, i // 2, output % 32, i % 2] == weight[output, i]
    assert not panels[1, :, 8:].any()


def test_interleaving_puts_gate_and_up_rows_into_each_panel() -> None:
    order = interleave_gate_up(torch.arange(64)).tolist()
    assert order == [*range(16), *range(32, 48), *range(16, 32), *range(48, 64)]


def test_embedding_returns_the_packed_rows(ops: LinearOps) -> None:
    weight = rand(70, 66)
    packed = pack_bf16(weight)
    for tokens in (0, 1, 5, 3000):
        ids = torch.randint(70, (tokens,), generator=torch.Generator().manual_seed(tokens))
        assert torch.equal(ops.packed_embedding(ids, packed, 70, 66, BF16), weight[ids])


@pytest.mark.parametrize("bad", [-1, 70, 1 << 40])
def test_embedding_refuses_ids_outside_the_table(ops: LinearOps, bad: int) -> None:
    packed = pack_bf16(rand(70, 66))  # the second panel has room for 96: padding is refused too
    with pytest.raises(RuntimeError, match=f"id {bad} is outside"):
        ops.packed_embedding(torch.tensor([3, bad]), packed, 70, 66, BF16)


def test_what_does_not_fit_is_refused(ops: LinearOps) -> None:
    x, packed = rand(3, 64), pack_bf16(rand(64, 64))

    def linear(**changes: object) -> None:
        given = {"x": x, "weight": packed, "n": 64, "format": BF16, "bias": None, "norm": None, "residual": None}
        given |= {"gate": 0, "isa": 0} | changes
        ops.packed_linear(
            *(given[name] for name in ("x", "weight", "n", "format", "bias", "norm")),
            EPS,
            given["residual"],
            given["gate"],
            False,
            given["isa"],
        )

    linear()
    refused: list[tuple[str, dict[str, object]]] = [
        ("x must be", {"x": x.float()}),
        ("x must be", {"x": rand(64, 3).T}),
        ("x must have two dimensions", {"x": x[0]}),
        ("do not hold k = 62", {"x": x[:, :62]}),
        ("weight must be", {"n": 65}),
        ("weight must be", {"n": 32}),
        ("weight must be", {"weight": packed.view(torch.int8)}),
        ("multiples of 64", {"weight": torch.zeros(2 * 4096 + 2, dtype=torch.uint8)[2:].view(2, 4096)}),
        ("unknown weight format", {"format": max(Format) + 1}),
        ("do not hold", {"format": int(Format.INT8)}),
        ("bias must be", {"bias": rand(63)}),
        ("norm_weight must be", {"norm": rand(64).double()}),
        ("norm_weight must be", {"norm": rand(65).float()}),
        ("unknown gate 3", {"gate": 3}),
        ("residual must be", {"residual": rand(3, 32)}),
        ("residual has 2 rows, x 3", {"residual": rand(2, 64)}),
        ("multiple of 32", {"n": 63, "gate": 1}),
        ("not available", {"isa": 99}),
    ]
    for message, changes in refused:
        with pytest.raises(RuntimeError, match=message):
            linear(**changes)


def test_packing_refuses_what_it_cannot_hold() -> None:
    with pytest.raises(ValueError, match="packs inputs by 2"):
        pack_bf16(rand(4, 3))
    with pytest.raises(ValueError, match="matrix"):
        pack_bf16(rand(4))
    with pytest.raises(ValueError, match="multiple of 32"):
        interleave_gate_up(rand(48, 2))


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_float32_weights_make_what_nothing_rounds(ops: LinearOps, isa: str, shape: tuple[int, int]) -> None:
    n, k = shape
    weight = torch.randn(n, k, generator=torch.Generator().manual_seed(1))
    packed, number = pack_float32(weight), 1 + ISAS.index(isa)
    assert torch.equal(unpack(packed, n, k, Format.FLOAT32), weight)
    x = rand(200, k)
    found = ops.packed_linear(x, packed, n, FLOAT32, None, None, 0.0, None, 0, True, number)
    assert found.dtype == torch.float32
    magnitude = x.double().abs() @ weight.double().abs().T
    assert bool(((found.double() - exact(x, weight)).abs() <= magnitude * 2.0**-20).all())
    for rows in ROWS:
        some = ops.packed_linear(x[:rows], packed, n, FLOAT32, None, None, 0.0, None, 0, True, number)
        assert torch.equal(some, found[:rows])


@pytest.mark.parametrize(
    "changes", [{"bias": rand(32)}, {"norm": rand(8)}, {"residual": rand(3, 32)}, {"gate": 1}, {"wide": False}], ids=str
)
def test_float32_weights_have_nothing_around_them(ops: LinearOps, changes: dict[str, object]) -> None:
    given = {"bias": None, "norm": None, "eps": 0.0, "residual": None, "gate": 0, "wide": True} | changes
    with pytest.raises(RuntimeError, match="float32 weights make wide outputs, without norm, bias, gate or residual"):
        ops.packed_linear(rand(3, 8), pack_float32(torch.ones(32, 8)), 32, FLOAT32, *given.values(), 0)
