"""Layers in one run leave the bits that the same operators leave one after another."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache

import pytest
import torch
from tape_builder import INPUT, RESULT, SCRATCH, Heads, Ref, TapeBuilder, Weights, linear, rotated, run_tape
from torch import Tensor

from engine.cpu_kernels.formats import Format
from engine.cpu_kernels.linear import LinearOps, interleave_gate_up, pack_bf16
from engine.cpu_kernels.quantize import pack_int4, pack_int8

HIDDEN, INNER, HEADS, KV_HEADS, DIM = 320, 704, 5, 1, 64
"""at one row some of these layers are worth one thread and some several"""
QKV = (HEADS + 2 * KV_HEADS) * DIM
EPS = 1e-5
ROWS = [1, 2, 7, 33, 64, 200]
THREADS = [1, 2, 3, 5]
PACK = {Format.BFLOAT16: pack_bf16, Format.INT8: pack_int8, Format.Q4_1: pack_int4}
by_format = pytest.mark.parametrize("format", PACK, ids=lambda format: format.name)


@dataclass(frozen=True)
class Layer:
    """From one attention to the next."""

    o: Weights
    gate_up: Weights
    down: Weights
    qkv: Weights
    heads: Heads


@dataclass(frozen=True)
class Inputs:
    attended: Tensor
    hidden: Tensor
    rope: Tensor


def rand(*shape: int, seed: int, scale: float = 1.0) -> Tensor:
    return (torch.randn(*shape, generator=torch.Generator().manual_seed(seed)) * scale).bfloat16()


@cache
def layers(format: Format, count: int, extras: bool) -> tuple[Layer, ...]:
    """`extras`: biases, and norms of the heads."""

    def weights(n: int, k: int, seed: int, norm: bool = False, gated: bool = False) -> Weights:
        matrix, bias = rand(n, k, seed=seed, scale=k**-0.5), rand(n, seed=seed + 1, scale=0.3) if extras else None
        if gated:
            matrix, bias = interleave_gate_up(matrix), None if bias is None else interleave_gate_up(bias)
        norm_weight = rand(k, seed=seed + 2, scale=0.1) + 1 if norm else None
        return Weights(PACK[format](matrix), n, k, format, bias, norm_weight, EPS if norm else 0.0, gated)

    def layer(seed: int) -> Layer:
        norms = (rand(DIM, seed=seed + 50) + 1, rand(DIM, seed=seed + 51) + 1) if extras else None
        return Layer(
            weights(HIDDEN, HEADS * DIM, seed),
            weights(2 * INNER, HIDDEN, seed + 10, norm=True, gated=True),
            weights(HIDDEN, INNER, seed + 20),
            weights(QKV, HIDDEN, seed + 30, norm=True),
            Heads(HEADS, KV_HEADS, DIM, norms, EPS),
        )

    return tuple(layer(100 * index) for index in range(count))


def inputs_of(rows: int) -> Inputs:
    angles = torch.rand(rows, DIM // 2, generator=torch.Generator().manual_seed(rows)) * 7
    rope = torch.cat((angles.cos(), angles.sin()), dim=1).bfloat16()
    return Inputs(rand(rows, HEADS * DIM, seed=rows), rand(rows, HIDDEN, seed=rows + 1), rope)


def one_by_one(ops: LinearOps, chain: tuple[Layer, ...], given: Inputs) -> list[Tensor]:
    """hidden, and the rotated qkv; between two layers q stands for what attention would return."""
    torch.set_num_threads(1)
    attended, hidden, qkv = given.attended, given.hidden, torch.empty(0)
    for layer in chain:
        hidden = linear(ops, layer.o, attended, hidden)
        hidden = linear(ops, layer.down, linear(ops, layer.gate_up, hidden), hidden)
        qkv = rotated(ops, layer.heads, linear(ops, layer.qkv, hidden), given.rope)
        attended = qkv[:, : HEADS * DIM]
    return [hidden, qkv]


def tape_of(ops: LinearOps, chain: tuple[Layer, ...], *, alone: bool = False) -> tuple[TapeBuilder, Tensor]:
    """Every layer has the same places in scratch memory; every other one rotates heads in their place. `alone`: each
    operator is a step of its own."""
    t = TapeBuilder()
    attended, hidden, rope = (t.value(columns, INPUT) for columns in (HEADS * DIM, HIDDEN, DIM))
    first = t.value(HIDDEN, SCRATCH)
    inner, second, heads, others = (t.value(columns, SCRATCH) for columns in (INNER, HIDDEN, QKV, QKV))
    x: Ref = (attended, 0)
    for index, layer in enumerate(chain):
        if layer is chain[-1]:
            second, heads, others = t.value(HIDDEN, RESULT), t.value(QKV, SCRATCH), t.value(QKV, RESULT)
        in_place = index % 2 == 0 and layer is not chain[-1]
        t.matrix(layer.o, x, (first, 0), (hidden, 0), alone=alone)
        t.matrix(layer.gate_up, (first, 0), (inner, 0), alone=alone)
        t.matrix(layer.down, (inner, 0), (second, 0), (first, 0), alone=alone)
        t.matrix(layer.qkv, (second, 0), (heads, 0), alone=alone)
        out = heads if in_place else others
        t.rotation(layer.heads, (heads, 0), (rope, 0), (out, 0), alone=alone)
        x, hidden = (out, 0), second
    return t, t.make(ops)


def assert_same(found: list[Tensor], expected: list[Tensor]) -> None:
    for one, other in zip(found, expected, strict=True):
        assert torch.equal(one.view(torch.int16), other.view(torch.int16))


@pytest.fixture(autouse=True)
def threads_as_before() -> Iterator[None]:
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="session")
def ops(linear_ops: LinearOps) -> LinearOps:
    return linear_ops


@by_format
@pytest.mark.parametrize("extras", [False, True], ids=["plain", "biases_and_norms"])
def test_a_chain_on_any_number_of_threads_equals_single_calls(ops: LinearOps, format: Format, extras: bool) -> None:
    chain = layers(format, 3, extras)
    held, tape = tape_of(ops, chain)
    assert len(held.steps) == 1
    for rows in ROWS:
        given = inputs_of(rows)
        expected = one_by_one(ops, chain, given)
        for threads in THREADS:
            torch.set_num_threads(threads)
            for _ in range(3):
                assert_same(run_tape(ops, tape, [given.attended, given.hidden, given.rope]), expected)


@by_format
def test_a_region_of_its_own_for_each_layer_changes_nothing(ops: LinearOps, format: Format) -> None:
    chain = layers(format, 2, True)
    held, tape = tape_of(ops, chain, alone=True)
    assert len(held.steps) == 10
    for rows in (1, 33):
        given = inputs_of(rows)
        expected = one_by_one(ops, chain, given)
        torch.set_num_threads(3)
        assert_same(run_tape(ops, tape, [given.attended, given.hidden, given.rope]), expected)


@pytest.mark.timeout(120)
@by_format
@pytest.mark.parametrize(("rows", "runs"), [(1, 1000), (2, 300), (30, 150)], ids=str)
def test_threads_never_overtake_each_other(ops: LinearOps, format: Format, rows: int, runs: int) -> None:
    """More threads than cores here or there: whoever comes late finds the work of others done, or begun."""
    chain = layers(format, 4, False)
    held, tape = tape_of(ops, chain)
    given = inputs_of(rows)
    expected = one_by_one(ops, chain, given)
    torch.set_num_threads(3)
    for _ in range(runs):
        assert_same(run_tape(ops, tape, [given.attended, given.hidden, given.rope]), expected)
    assert held.tensors


@pytest.fixture
def busy_machine() -> Iterator[None]:
    """A process for each core that only computes."""
    command = [sys.executable, "-c", "while True: pass"]
    others = [subprocess.Popen(command) for _ in range(os.cpu_count() or 1)]
    try:
        yield
    finally:
        for other in others:
            other.kill()
            other.wait()


@pytest.mark.timeout(120)
@pytest.mark.usefixtures("busy_machine")
@pytest.mark.parametrize("rows", [1, 30])
def test_who_loses_its_core_in_the_middle_changes_nothing(ops: LinearOps, rows: int) -> None:
    """Threads come back to runs that have gone on without them, or have ended."""
    chain = layers(Format.Q4_1, 6, False)
    _held, tape = tape_of(ops, chain)
    given = inputs_of(rows)
    expected = one_by_one(ops, chain, given)
    torch.set_num_threads(4)
    until = time.monotonic() + 2
    while time.monotonic() < until:
        assert_same(run_tape(ops, tape, [given.attended, given.hidden, given.rope]), expected)


def test_layers_of_few_and_of_many_outputs_take_turns(ops: LinearOps) -> None:
    """One panel after hundreds, and the other way round: some threads have nothing to do in every second layer."""
    few, many = 6, 4096
    t = TapeBuilder()
    x, narrow, wide, out = t.value(few, INPUT), t.value(few, SCRATCH), t.value(many, SCRATCH), t.value(few, RESULT)
    up = Weights(pack_bf16(rand(many, few, seed=1)), many, few, Format.BFLOAT16)
    down = Weights(pack_bf16(rand(few, many, seed=2, scale=many**-0.5)), few, many, Format.BFLOAT16)
    source = x
    for target in (narrow, narrow, out):
        t.matrix(up, (source, 0), (wide, 0))
        t.matrix(down, (wide, 0), (target, 0))
        source = target
    tape = t.make(ops)
    for rows in (1, 5, 70):
        given = rand(rows, few, seed=3)
        torch.set_num_threads(1)
        expected = given
        for _ in range(3):
            expected = linear(ops, down, linear(ops, up, expected))
        for threads in THREADS:
            torch.set_num_threads(threads)
            for _ in range(10):
                assert_same(run_tape(ops, tape, [given]), [expected])


def test_inputs_may_be_columns_of_wider_rows(ops: LinearOps) -> None:
    chain = layers(Format.BFLOAT16, 2, True)
    held, tape = tape_of(ops, chain)
    given = inputs_of(9)
    wide = [torch.nn.functional.pad(t, (3, 5))[:, 3:-5] for t in (given.attended, given.hidden, given.rope)]
    assert all(not t.is_contiguous() for t in wide)
    assert_same(run_tape(ops, tape, wide), one_by_one(ops, chain, given))
    assert held.tensors


def test_no_rows_are_no_rows(ops: LinearOps) -> None:
    held, tape = tape_of(ops, layers(Format.INT8, 2, False))
    given = inputs_of(0)
    found = run_tape(ops, tape, [given.attended, given.hidden, given.rope])
    assert [t.shape for t in found] == [(0, HIDDEN), (0, QKV)]
    assert held.tensors
