"""A library built for one CPU has what its own units call: a test of every ISA's library would never miss it."""

from __future__ import annotations

import re
import shutil
from pathlib import Path

import pytest
import torch
from random_blocks import BLOCK_FORMATS, blocks_of

from attention_backends import native_build
from attention_backends.native_build import ISAS, Unit
from engine.cpu_kernels.build import sources
from engine.cpu_kernels.linear import LinearOps, load
from engine.cpu_kernels.quantize import pack_blocks

CALL = re.compile(r"\b(linear_\w+?|rotate_heads)_(" + "|".join(ISAS) + r")\(")
CHOOSES = "linear_isa.cpp"
"""whose references are weak: what is missing is not chosen"""


def made_by(units: tuple[Unit, ...]) -> set[tuple[str, str]]:
    """(name, ISA) of the tables that units export."""
    return {
        (name.removesuffix("_"), isa)
        for unit in units
        for name in re.findall(r"PAGELOOM_FOR_ISA\((\w+)\)", unit.source.read_text())
        for isa in unit.isas or ()
    }


def called(unit: Unit) -> set[tuple[str, str]]:
    """Of other units: a unit for one ISA defines what it calls of its own."""
    return {(name, isa) for name, isa in CALL.findall(unit.source.read_text()) if (isa,) != unit.isas}


@pytest.mark.parametrize("widest", ISAS)
def test_a_build_for_one_cpu_has_every_kernel_that_it_calls(widest: str) -> None:
    has = frozenset(ISAS[: ISAS.index(widest) + 1])
    units = tuple(unit.for_cpu(has) for unit in sources().units)
    calls = {call for unit in units if unit.isas != () and unit.source.name != CHOOSES for call in called(unit)}
    assert calls - made_by(units) == set()
    assert (widest == "amx") == bool(calls)  # tiles leave some shapes to vectors: something is looked at here


@pytest.mark.slow
@pytest.mark.exhaustive  # a minute of a compiler
def test_a_library_for_this_cpu_multiplies_blocks_as_that_of_every_isa_does(
    linear_ops: LinearOps, native_cache: Path, tmp_path: Path
) -> None:
    """By the same kernels, whose sums have an order of their own: not by the portable ones."""
    built = native_build.build(sources().for_this_cpu(), native_cache).path  # where whoever starts an engine has it
    (tmp_path / built.parent.name).mkdir(mode=0o700)
    shutil.copy(built, tmp_path / built.parent.name)
    own = load(tmp_path)
    x = torch.randn(32, 768, generator=torch.Generator().manual_seed(1)).bfloat16()
    for format in BLOCK_FORMATS:
        weight = pack_blocks(blocks_of(format, 256, 768), format)
        ours, theirs = (
            ops.packed_linear(x, weight, 256, int(format), None, None, 0.0, None, 0, True, 0)
            for ops in (own, linear_ops)
        )
        assert torch.equal(ours, theirs), format.name
