"""Quantised layers against float64 on exactly the weights and activations that they multiply, on every ISA here."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache

import pytest
import torch
from random_blocks import BLOCK_FORMATS, FLOAT_FORMATS, block_of, blocks_of
from torch import Tensor

from attention_backends.native_build import ISAS
from engine.cpu_kernels.formats import Format
from engine.cpu_kernels.linear import LinearOps, interleave_gate_up, pack_bf16
from engine.cpu_kernels.quantize import pack_blocks, pack_int4, pack_int8, unpack
from engine.cpu_kernels.rotation import rotate, rotate_back
from engine.models.layers import activated
from engine.models.packed import FUSED_GATES
from engine.models.spec import Activation

_FORMATS = (Format.INT8, *BLOCK_FORMATS)
_EPS = 1e-5
_AMX_ROWS = 24  # from here on AMX multiplies group formats decoded to bf16
_FLOAT8 = (Format.FLOAT8, Format.FLOAT8_BLOCK)  # decoded to bf16 for any number of rows
_by_format = pytest.mark.parametrize("format", _FORMATS, ids=lambda format: format.name)
_by_isa = pytest.mark.parametrize("isa", ISAS)


@dataclass(frozen=True)
class _Layer:
    n: int
    k: int
    format: Format
    packed: Tensor
    values: Tensor
    """float64 [n, k]"""


@cache
def _layer(n: int, k: int, format: Format) -> _Layer:
    generator = torch.Generator().manual_seed(n * k)
    if format == Format.INT8:
        packed = pack_int8(torch.randn(n, k, generator=generator) * 0.05)
    else:
        packed = pack_blocks(blocks_of(format, n, k), format)
    return _Layer(n, k, format, packed, unpack(packed, n, k, format).double())


def _rows(count: int, k: int, seed: int = 0) -> Tensor:
    return torch.randn(count, k, generator=torch.Generator().manual_seed(seed)).bfloat16()


def _number(ops: LinearOps, isa: str) -> int:
    if isa not in ops.isas:
        pytest.skip(f"this CPU has no {isa}")
    return ISAS.index(isa) + 1


def _run(
    ops: LinearOps,
    layer: _Layer,
    x: Tensor,
    isa: int = 0,
    *,
    bias: Tensor | None = None,
    norm: Tensor | None = None,
    residual: Tensor | None = None,
    gate: int = 0,
    wide: bool = False,
) -> Tensor:
    out: Tensor = ops.packed_linear(
        x, layer.packed, layer.n, int(layer.format), bias, norm, _EPS, residual, gate, wide, isa
    )
    return out


def _norm(x: Tensor, weight: Tensor) -> Tensor:
    x = x.float()
    normed = x / (x.square().mean(1, keepdim=True) + _EPS).sqrt()
    return weight * normed.bfloat16() if weight.dtype == torch.bfloat16 else (weight * normed).bfloat16()


def _quantised(x: Tensor, format: Format) -> Tensor:
    """float64 [rows, k]: what int8 activations stand for; one scale a row, which is turned, or 32 inputs."""
    if format == Format.INT8:
        return rotate_back(_levels(rotate(x.float()).view(x.shape[0], 1, -1)).view(x.shape))
    return _levels(x.float().view(x.shape[0], -1, 32)).view(x.shape)


def _levels(groups: Tensor) -> Tensor:
    largest = groups.abs().amax(2, keepdim=True)
    inverse = torch.where(largest > 0, torch.full_like(largest, 127) / largest, 0.0)  # 127 / x would round twice
    levels = (groups * inverse).round()
    return levels.double() * (largest / 127).double()


def _product(layer: _Layer, x: Tensor, isa: str) -> Tensor:
    """float64 [rows, n], and what the weights are in the path that this ISA and number of rows take."""
    as_bf16 = isa == "amx" and layer.format != Format.INT8 and x.shape[0] >= _AMX_ROWS
    if as_bf16 or layer.format in _FLOAT8:
        return x.double() @ layer.values.bfloat16().double().T
    return _quantised(x, layer.format) @ layer.values.T


def _assert_near(actual: Tensor, expected: Tensor, roundings: int = 1) -> None:
    """Within bf16 roundings of the expected value, and what float32 sums lose of the largest."""
    allowed = expected.abs() * roundings * 2.0**-8 + expected.abs().max() * 2e-5
    assert bool(((actual.double() - expected).abs() <= allowed).all())


@_by_isa
@_by_format
@pytest.mark.parametrize("rows", [1, 3, 8, 17, 24, 64, 200])
def test_product_of_quantised_rows_and_weights(linear_ops: LinearOps, format: Format, isa: str, rows: int) -> None:
    number, layer, x = _number(linear_ops, isa), _layer(100, 512, format), _rows(rows, 512)
    out = _run(linear_ops, layer, x, number)
    assert out.dtype == torch.bfloat16 and out.shape == (rows, 100)
    _assert_near(out, _product(layer, x, isa))


@_by_isa
@_by_format
@pytest.mark.parametrize(("rows", "norm_dtype"), [(2, torch.bfloat16), (40, torch.bfloat16), (3, torch.float32)])
def test_norm_bias_and_residual_round_where_separate_layers_do(
    linear_ops: LinearOps, format: Format, isa: str, rows: int, norm_dtype: torch.dtype
) -> None:
    number, layer, x = _number(linear_ops, isa), _layer(70, 768, format), _rows(rows, 768)
    generator = torch.Generator().manual_seed(4)
    norm = (torch.rand(768, generator=generator) + 0.5).to(norm_dtype)
    bias = torch.randn(70, generator=generator).bfloat16()
    residual = torch.randn(rows, 90, generator=generator).bfloat16()[:, 10:80]
    out = _run(linear_ops, layer, x, number, bias=bias, norm=norm, residual=residual, wide=True)
    assert out.dtype == torch.float32 and torch.equal(out, out.bfloat16().float())
    product = _product(layer, _norm(x, norm), isa) + bias.double()
    expected = product.bfloat16().double() + residual.double()
    # A square root that differs in its last bit moves single activations to the next bf16, and those a level further.
    allowed = expected.abs() * 2.0**-8 + product.abs() * 2.0**-8 + product.abs().max() * 4e-3
    assert bool(((out.double() - expected).abs() <= allowed).all())


@_by_isa
@_by_format
@pytest.mark.parametrize(("rows", "kind"), [(1, "silu"), (33, "silu"), (33, "gelu_tanh")])
def test_gated_layer_is_activation_of_gate_times_up(
    linear_ops: LinearOps, format: Format, isa: str, rows: int, kind: Activation
) -> None:
    inner, k = 48, 256
    number, plain, x = _number(linear_ops, isa), _layer(2 * inner, k, format), _rows(rows, k)
    order = interleave_gate_up(torch.arange(2 * inner))
    out = _run(linear_ops, plain, x, number, gate=FUSED_GATES[kind])
    product = _product(plain, x, isa).bfloat16().double()
    split = torch.empty_like(product)
    split[:, order] = product
    gate, up = split.chunk(2, dim=1)
    assert out.shape == (rows, inner)
    _assert_near(out, activated(gate, kind) * up, roundings=4)


@_by_format
def test_no_rows_give_an_empty_result(linear_ops: LinearOps, format: Format) -> None:
    assert _run(linear_ops, _layer(100, 512, format), _rows(0, 512)).shape == (0, 100)


@pytest.mark.parametrize("k", [4, 36, 64, 100, 576, 4096])
@pytest.mark.parametrize("with_norm", [False, True], ids=["plain", "norm"])
def test_int8_gives_the_same_bits_on_every_isa_batch_and_number_of_threads(
    linear_ops: LinearOps, k: int, with_norm: bool
) -> None:
    layer, x = _layer(101, k, Format.INT8), _rows(45, k, seed=k) * 3
    norm = _rows(1, k, seed=1)[0] if with_norm else None
    bias = _rows(1, 101, seed=2)[0]
    first = _run(linear_ops, layer, x, ISAS.index("portable") + 1, bias=bias, norm=norm)
    _assert_near(first, first.double())
    for isa in linear_ops.isas:
        for rows in (slice(0, 45), slice(0, 1), slice(7, 9), slice(3, 8), slice(20, 37), slice(12, 45)):
            out = _run(linear_ops, layer, x[rows], ISAS.index(isa) + 1, bias=bias, norm=norm)
            assert torch.equal(out, first[rows]), (isa, rows)
    torch.set_num_threads(2)
    assert torch.equal(_run(linear_ops, layer, x, bias=bias, norm=norm), first)


@_by_format
def test_a_row_does_not_depend_on_its_batch_below_amx(linear_ops: LinearOps, format: Format) -> None:
    layer, x = _layer(100, 512, format), _rows(23, 512)
    for isa in (isa for isa in linear_ops.isas if isa != "amx"):
        number = ISAS.index(isa) + 1
        together = _run(linear_ops, layer, x, number)
        alone = torch.cat([_run(linear_ops, layer, row, number) for row in torch.split(x, [1, 2, 3, 5, 12])])
        assert torch.equal(together, alone), isa


@_by_isa
@_by_format
@pytest.mark.parametrize("rows", [5, 40])
def test_a_row_that_is_not_finite_leaves_the_others_alone(
    linear_ops: LinearOps, format: Format, isa: str, rows: int
) -> None:
    number, layer, x = _number(linear_ops, isa), _layer(100, 512, format), _rows(rows, 512)
    clean = _run(linear_ops, layer, x, number)
    for bad in (float("nan"), float("inf"), float("-inf")):
        spoiled = x.clone()
        spoiled[2, 77] = bad
        for norm in (None, torch.ones(512, dtype=torch.bfloat16)):
            out = _run(linear_ops, layer, spoiled, number, norm=norm)
            others = [row for row in range(rows) if row != 2]
            expected = clean if norm is None else _run(linear_ops, layer, x, number, norm=norm)
            assert torch.equal(out[others], expected[others])
            assert not bool(out[2].isfinite().any())
            if format not in _FLOAT8 and (format == Format.INT8 or rows < _AMX_ROWS):
                assert bool(out[2].isnan().all())


@_by_isa
@_by_format
@pytest.mark.parametrize("scale", [2.0**-133, 2.0**-60, 2.0**40])
def test_rows_of_zeros_and_of_extreme_scale(linear_ops: LinearOps, format: Format, isa: str, scale: float) -> None:
    number, layer = _number(linear_ops, isa), _layer(100, 512, format)
    x = _rows(9, 512) * scale
    x[4] = 0
    out = _run(linear_ops, layer, x, number)
    assert bool(out.isfinite().all()) and not out[4].any()
    expected = _product(layer, x, isa)
    if scale < 2.0**-110:  # counts as zero, where rows are quantised
        assert float(out.abs().max()) < (1e-36 if format in _FLOAT8 else 1e-45)
    else:
        _assert_near(out, expected)


@_by_isa
def test_the_largest_integers_do_not_saturate(linear_ops: LinearOps, isa: str) -> None:
    number, k = _number(linear_ops, isa), 8192
    weight = rotate_back(torch.ones(32, k))  # one for every input once it is turned
    weight[1::2] = -weight[1::2]
    packed = pack_int8(weight)
    layer = _Layer(32, k, Format.INT8, packed, unpack(packed, 32, k, Format.INT8).double())
    for sign in (1.0, -1.0):
        x = rotate_back(torch.full((17, k), sign)).bfloat16()
        assert bool((rotate(x.float()) == sign).all())
        _assert_near(_run(linear_ops, layer, x, number), _product(layer, x, isa), roundings=0)


def _filled(blocks: Tensor, format: Format, byte: int) -> Tensor:
    """Blocks of 32 rows and 256 inputs whose levels are all that byte, of moderate scales."""
    if format in FLOAT_FORMATS:
        size, end = (17, 136) if format is Format.MXFP4 else (18, 144)
        filled = blocks.clone()
        filled[:, :end].view(32, -1, size)[..., size - 16 :] = byte
        return filled
    filled = torch.where(blocks >= 0, byte, blocks).to(torch.uint8)
    half = torch.tensor([0.01], dtype=torch.float16).view(torch.uint8)
    size, (at, count) = block_of(format)
    filled.view(32, -1, size)[:, :, at : at + 2 * count] = half.repeat(count)
    if format == Format.INT4_GROUP:
        filled.view(32, -1, size)[:, :, 2:4] = torch.tensor([16.0], dtype=torch.float16).view(torch.uint8)
    return filled


@pytest.mark.parametrize("format", sorted({*BLOCK_FORMATS} - {*_FLOAT8}), ids=lambda format: format.name)
@_by_isa
def test_extreme_levels_do_not_saturate(linear_ops: LinearOps, format: Format, isa: str) -> None:
    number, blocks = _number(linear_ops, isa), blocks_of(format, 32, 256)
    for byte in (0, 0x80, 0x7F, 0xFF):
        packed = pack_blocks(_filled(blocks, format, byte), format)
        layer = _Layer(32, 256, format, packed, unpack(packed, 32, 256, format).double())
        for sign in (1.0, -1.0):
            x = torch.full((3, 256), sign).bfloat16()
            out = _run(linear_ops, layer, x, number)
            expected = _product(layer, x, isa)
            reach = _quantised(x, format).abs() @ layer.values.abs().T
            assert bool(((out.double() - expected).abs() <= expected.abs() * 2.0**-8 + reach * 1e-5).all())


@_by_format
def test_embedding_gives_the_rows_of_the_matrix(linear_ops: LinearOps, format: Format) -> None:
    layer = _layer(100, 512, format)
    ids = torch.tensor([99, 0, 31, 32, 57, 0])
    out = linear_ops.packed_embedding(ids, layer.packed, 100, 512, int(format))
    assert torch.equal(out, layer.values[ids].float().bfloat16())
    for bad in (-1, 100):
        with pytest.raises(RuntimeError, match="outside"):
            linear_ops.packed_embedding(torch.tensor([bad]), layer.packed, 100, 512, int(format))


@_by_isa
@pytest.mark.parametrize("rows", [1, 2, 3, 4, 7, 70])
@pytest.mark.parametrize(("n", "k"), [(1, 128), (33, 256), (100, 4096)])
def test_floats_of_eight_bits_give_the_bits_of_the_same_matrix_in_bfloat16(
    linear_ops: LinearOps, isa: str, n: int, k: int, rows: int
) -> None:
    number, x = _number(linear_ops, isa), _rows(rows, k)
    for format in _FLOAT8:
        layer = _layer(n, k, format)
        bf16 = _Layer(n, k, Format.BFLOAT16, pack_bf16(layer.values), layer.values)
        assert torch.equal(_run(linear_ops, layer, x, number), _run(linear_ops, bf16, x, number))


@pytest.mark.parametrize("format", FLOAT_FORMATS, ids=lambda format: format.name)
def test_every_float_is_decoded_to_its_value(linear_ops: LinearOps, format: Format) -> None:
    k = 256
    blocks = blocks_of(format, 256, k)
    if format is Format.MXFP4:
        blocks.view(256, -1, 17)[..., 0] = torch.arange(256)[:, None] % 240  # powers, the least a subnormal float
    elif format is Format.NVFP4:
        scales = torch.arange(256).to(torch.uint8)
        blocks[:, :-4].view(256, -1, 18)[..., 0] = torch.where(scales & 127 == 127, 0, scales)[:, None]
    else:
        codes = torch.arange(256).to(torch.uint8)
        blocks[:, :128] = torch.where(codes & 127 == 127, 0, codes)[:, None]
    packed = pack_blocks(blocks, format)
    values = unpack(packed, 256, k, format)
    rows = linear_ops.packed_embedding(torch.arange(256), packed, 256, k, int(format))
    assert torch.equal(rows, values.bfloat16())
    layer = _Layer(256, k, format, packed, values.double())
    for isa in linear_ops.isas:
        for count in (3, _AMX_ROWS):
            x = _rows(count, k)
            out = _run(linear_ops, layer, x, ISAS.index(isa) + 1)
            expected = _product(layer, x, isa)
            reach = (_quantised(x, format).abs() @ layer.values.abs().T) * 1e-5 + 1e-36
            assert bool(((out.double() - expected).abs() <= expected.abs() * 2.0**-8 + reach).all()), isa


def test_int4_runs_as_q4_1(linear_ops: LinearOps) -> None:
    weight = torch.randn(64, 256, generator=torch.Generator().manual_seed(9)) * 0.05
    packed = pack_int4(weight)
    layer = _Layer(64, 256, Format.Q4_1, packed, unpack(packed, 64, 256, Format.Q4_1).double())
    x = _rows(4, 256)
    _assert_near(_run(linear_ops, layer, x), _product(layer, x, "auto"))
