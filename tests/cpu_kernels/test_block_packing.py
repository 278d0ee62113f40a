"""Packing moves weights about and changes none: against the decoder of whole files, and against the gguf library."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
import torch
from gguf import GGMLQuantizationType, quants
from random_blocks import BLOCK_FORMATS, ENCODINGS, blocks_of, random_blocks

from engine.cpu_kernels.formats import FORMAT_OF_GGUF, Format, packable, panel_bytes
from engine.cpu_kernels.quantize import pack_blocks, pack_float8, pack_int4, pack_int8, unpack
from engine.cpu_kernels.rotation import rotate_back
from engine.weights.gguf_dequant import dequantize_into

_BITS = {
    "Q2_K": 2.625,
    "Q3_K": 3.5625,
    "IQ4_XS": 4.3125,
    "MXFP4": 4.25,
    "IQ4_NL": 4.5,
    "Q4_0": 4.5,
    "Q4_K": 4.625,
    "Q4_1": 5,
    "Q5_0": 5.5,
    "Q5_K": 5.625,
    "Q5_1": 6,
    "Q6_K": 6.5625,
    "Q8_0": 8.5,
}
"""of a weight as it runs, with all that belongs to it: `engine/weights/README.md`"""
_Pack = Callable[[torch.Tensor], torch.Tensor]
_BY_NAME = pytest.mark.parametrize("encoding", ENCODINGS, ids=lambda encoding: encoding.name)


@_BY_NAME
def test_a_hundred_packed_random_matrices_hold_the_same_values_bit_for_bit(encoding: GGMLQuantizationType) -> None:
    format = FORMAT_OF_GGUF[encoding]
    for seed in range(100):
        n, k = 1 + 7 * seed % 70, 256 * (1 + seed % 3)
        blocks = random_blocks(encoding, n, k, seed)
        packed = pack_blocks(blocks, format)
        assert packed.shape == (-(-n // 32), panel_bytes(k, format))
        values = unpack(packed, n, k, format)
        whole = torch.empty(n, k)
        dequantize_into(blocks.flatten(), encoding, whole)
        assert torch.equal(values.view(torch.int32), whole.view(torch.int32))
        library = quants.dequantize(np.ascontiguousarray(blocks.numpy()), encoding)
        assert np.array_equal(values.numpy(), library.reshape(n, k))


@_BY_NAME
def test_packed_random_blocks_are_not_inflated(encoding: GGMLQuantizationType) -> None:
    blocks = random_blocks(encoding, 64, 1024)
    packed = pack_blocks(blocks, FORMAT_OF_GGUF[encoding])
    assert packed.numel() == 64 * 1024 * _BITS[encoding.name] / 8
    assert packed.numel() <= 1.04 * blocks.numel()  # 6-bit scales take a byte each


@_BY_NAME
def test_a_matrix_of_many_runs_of_panels_is_packed_as_one(encoding: GGMLQuantizationType) -> None:
    blocks, format = random_blocks(encoding, 33 * 32 + 5, 512), FORMAT_OF_GGUF[encoding]
    alone = torch.cat([pack_blocks(part, format) for part in torch.split(blocks, 32)])
    assert torch.equal(pack_blocks(blocks, format), alone)


@pytest.mark.parametrize("format", BLOCK_FORMATS, ids=lambda format: format.name)
def test_outputs_that_pad_the_last_panel_are_zero(format: Format) -> None:
    packed = pack_blocks(blocks_of(format, 3, 256), format)
    assert not unpack(packed, 32, 256, format)[3:].any()


@pytest.mark.parametrize(("n", "k"), [(32, 256), (1, 32), (70, 768)])
def test_four_bits_and_a_zero_point_stand_for_their_exact_product(n: int, k: int) -> None:
    blocks = blocks_of(Format.INT4_GROUP, n, k)
    fields = blocks.view(n, k // 32, 20)
    d, z = (fields[..., at : at + 2].contiguous().view(torch.float16).double() for at in (0, 2))
    levels = torch.cat((fields[..., 4:] & 15, fields[..., 4:] >> 4), dim=2).double()
    values = unpack(pack_blocks(blocks, Format.INT4_GROUP), n, k, Format.INT4_GROUP)
    assert torch.equal(values.double(), (d * (levels - z)).view(n, k))


def test_int8_weights_are_within_half_a_step_of_their_output() -> None:
    weight = torch.randn(70, 96, generator=torch.Generator().manual_seed(1)) * torch.logspace(-20, 20, 70)[:, None]
    weight[5] = 0
    turned = rotate_back(weight)
    error = (rotate_back(unpack(pack_int8(weight), 70, 96, Format.INT8)) - turned).abs()
    step = turned.abs().amax(1, keepdim=True) / 127
    assert bool((error <= step * 0.5001).all())


def test_float8_weights_are_the_nearest_e4m3_of_their_output() -> None:
    weight = torch.randn(70, 96, generator=torch.Generator().manual_seed(1)) * torch.logspace(-20, 20, 70)[:, None]
    weight[5] = 0
    scale = weight.abs().amax(1, keepdim=True) / 448
    values = unpack(pack_float8(weight), 70, 96, Format.FLOAT8)
    steps = torch.arange(256, dtype=torch.uint8).view(torch.float8_e4m3fn).float()
    nearest = (steps[steps.isfinite()] * scale[..., None] - weight[..., None]).abs().amin(2)
    assert bool(((values - weight).abs() <= nearest * 1.0001 + scale * 1e-6).all())
    assert not values[5].any()


def test_int4_weights_are_nearer_than_rounding_between_minimum_and_maximum() -> None:
    weight = torch.randn(96, 768, generator=torch.Generator().manual_seed(2)) * 0.05
    error = (unpack(pack_int4(weight), 96, 768, Format.Q4_1) - weight).square().sum()
    groups = weight.view(-1, 32)
    low, high = groups.amin(1, keepdim=True), groups.amax(1, keepdim=True)
    step = (high - low) / 15
    plain = ((groups - low) / step).round() * step + low - groups
    assert float(error) < 0.9 * float(plain.square().sum())


@pytest.mark.parametrize("value", [0.0, 0.75, -3.0])
def test_a_group_of_one_value_is_kept(value: float) -> None:
    weight = torch.full((4, 64), value)
    assert torch.equal(unpack(pack_int4(weight), 4, 64, Format.Q4_1), weight)


def test_a_group_far_from_zero_keeps_its_steps() -> None:
    weight = 8 + torch.arange(16).repeat(2).expand(32, 32) / 16
    assert torch.allclose(unpack(pack_int4(weight), 32, 32, Format.Q4_1), weight, atol=4e-3)


@pytest.mark.parametrize("pack", [pack_int8, pack_int4, pack_float8], ids=["int8", "int4", "fp8"])
def test_weights_that_are_not_finite_are_refused(pack: _Pack) -> None:
    for bad in (float("nan"), float("inf"), float("-inf")):
        weight = torch.zeros(8, 64)
        weight[3, 40] = bad
        with pytest.raises(ValueError, match="not finite"):
            pack(weight)


@pytest.mark.parametrize("pack", [pack_int8, pack_int4, pack_float8], ids=["int8", "int4", "fp8"])
def test_bfloat16_and_float32_weights_of_equal_value_pack_alike(pack: _Pack) -> None:
    weight = torch.randn(40, 64, generator=torch.Generator().manual_seed(3)).bfloat16()
    assert torch.equal(pack(weight), pack(weight.float()))


def test_what_does_not_fit_a_format_is_refused() -> None:
    assert not packable(32, 48, Format.Q4_0) and not packable(32, 128, Format.Q6_K) and not packable(32, 6, Format.INT8)
    with pytest.raises(ValueError, match="INT8"):
        pack_int8(torch.zeros(4, 6))
    with pytest.raises(ValueError, match="Q4_1"):
        pack_int4(torch.zeros(4, 48))
    with pytest.raises(ValueError, match="whole Q4_0 blocks"):
        pack_blocks(torch.zeros(4, 19, dtype=torch.uint8), Format.Q4_0)
    with pytest.raises(ValueError, match="has no blocks"):
        pack_blocks(torch.zeros(4, 18, dtype=torch.uint8), Format.INT8)
