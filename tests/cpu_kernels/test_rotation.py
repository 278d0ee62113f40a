"""Turning rows before they are quantised: what it is, that weights undo it, and what it is for."""

from __future__ import annotations

import pytest
import torch

from engine.cpu_kernels.formats import Format
from engine.cpu_kernels.linear import LinearOps
from engine.cpu_kernels.quantize import pack_int8
from engine.cpu_kernels.rotation import ROTATED, rotate, rotate_back


def _hadamard(size: int) -> torch.Tensor:
    """Sylvester's construction."""
    matrix = torch.ones(1, 1, dtype=torch.float64)
    while matrix.shape[0] < size:
        matrix = torch.cat((torch.cat((matrix, matrix), 1), torch.cat((matrix, -matrix), 1)))
    return matrix


@pytest.mark.parametrize("k", [4, 60, 64, 100, 576])
def test_whole_blocks_meet_sylvesters_matrix_and_the_rest_is_as_much_enlarged(k: int) -> None:
    x = torch.randn(3, k, dtype=torch.float64, generator=torch.Generator().manual_seed(k))
    whole = k // ROTATED * ROTATED
    expected = 8 * x
    expected[:, :whole] = (x[:, :whole].reshape(-1, ROTATED) @ _hadamard(ROTATED)).view(3, whole)
    torch.testing.assert_close(rotate(x), expected, rtol=0, atol=1e-12)
    torch.testing.assert_close(rotate_back(rotate(x)), x, rtol=0, atol=1e-12)


def test_an_outlier_costs_the_other_inputs_little(linear_ops: LinearOps) -> None:
    """One input a hundred times the others: one scale a row without turning would leave each of them about one bit."""
    generator = torch.Generator().manual_seed(1)
    weight, x = torch.randn(96, 576, generator=generator), torch.randn(40, 576, generator=generator)
    x[:, 70] *= 100
    x = x.bfloat16()
    exact = x.double() @ weight.double().T
    plain = x.float() / (scale := x.float().abs().amax(1, keepdim=True) / 127)
    plain_error = (plain.round().double() * scale.double() @ weight.double().T - exact).square().mean().sqrt()
    out = linear_ops.packed_linear(x, pack_int8(weight), 96, int(Format.INT8), None, None, 0.0, None, False, True, 0)
    error = (out.double() - exact).square().mean().sqrt()
    assert float(error) < 0.35 * float(plain_error)


@pytest.mark.parametrize("k", [40, 80, 100, 160, 704])
def test_inputs_behind_the_last_whole_block_cost_no_bits(linear_ops: LinearOps, k: int) -> None:
    """They share a scale with those that are turned: of another size, either would keep about five bits."""
    generator = torch.Generator().manual_seed(k)
    weight, x = torch.randn(96, k, generator=generator), torch.randn(40, k, generator=generator).bfloat16()
    exact = x.double() @ weight.double().T
    for isa in range(len(linear_ops.isas) + 1):
        packed = pack_int8(weight)
        out = linear_ops.packed_linear(x, packed, 96, int(Format.INT8), None, None, 0.0, None, False, True, isa)
        assert float((out.double() - exact).norm() / exact.norm()) < 0.02
    ids = torch.arange(96)
    rows = linear_ops.packed_embedding(ids, packed, 96, k, int(Format.INT8))
    assert float((rows.double() - weight).norm() / weight.norm()) < 0.015
