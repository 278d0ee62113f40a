"""A library built for one CPU has what its own units call: a test of every ISA's library would never miss it."""

from __future__ import annotations

import re

import pytest

from attention_backends.native_build import ISAS, Unit
from engine.cpu_kernels.build import sources

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
