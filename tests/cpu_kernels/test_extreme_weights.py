"""Finite weights become finite ones, whatever their magnitude."""

from __future__ import annotations

import pytest
import torch

from engine.cpu_kernels.formats import Format
from engine.cpu_kernels.quantize import PACK_DENSE, unpack


@pytest.mark.parametrize("format", PACK_DENSE, ids=lambda format: format.name)
@pytest.mark.parametrize("exponent", [-149, -133, -126, -112, -109, -100, 20, 60])
@pytest.mark.parametrize("alone", [False, True], ids=["all", "one"])
def test_magnitudes_at_the_ends_of_a_float(format: Format, exponent: int, alone: bool) -> None:
    weight = torch.randn(40, 64, generator=torch.Generator().manual_seed(3)) * 2.0**exponent
    if alone:  # a neuron that decayed to nothing but for one weight
        weight[7], weight[7, 3] = 0, 2.0**exponent
    found = unpack(PACK_DENSE[format](weight), 40, 64, format)
    assert found.isfinite().all()
    if format is Format.Q4_1 and not -20 < exponent < 10:  # beyond what a float16, its scale, can hold
        assert (found.abs() <= 2.0 ** max(exponent + 4, -20)).all()
        return
    error = (found - weight).abs().amax(1) / weight.abs().amax(1)
    assert (error <= (0.1 if exponent > -109 else 1.0)).all()
