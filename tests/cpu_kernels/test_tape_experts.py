"""Tapes with routes and experts: what those operators compute, from values of four bytes in between."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from tape_builder import INPUT, NONE, RESULT, SCRATCH, TapeBuilder, Weights, linear, run_tape
from torch import Tensor

from engine.cpu_kernels.experts import ExpertWeights, Routing, pack_experts
from engine.cpu_kernels.formats import Format
from engine.cpu_kernels.linear import LinearOps, pack_bf16, pack_float32

HIDDEN = 96


@pytest.fixture(scope="session")
def ops(linear_ops: LinearOps) -> LinearOps:
    return linear_ops


def rand(*shape: int, scale: float = 1.0) -> Tensor:
    return (torch.randn(*shape, generator=torch.Generator().manual_seed(sum(shape))) * scale).bfloat16()


EXPERTS = pack_experts(rand(5, 2 * 32, HIDDEN, scale=0.1), rand(5, HIDDEN, 32, scale=0.1), Format.BFLOAT16)
ROUTER = Weights(pack_bf16(rand(5, HIDDEN, scale=0.1)), 5, HIDDEN, Format.BFLOAT16, wide=True)
FLOAT_ROUTER = Weights(pack_float32(rand(5, HIDDEN).float() / 3), 5, HIDDEN, Format.FLOAT32, wide=True)


PART = replace(EXPERTS, gate_up=EXPERTS.gate_up[[1, 3]], down=EXPERTS.down[[1, 3]])
PLACES = torch.tensor([-1, 0, -1, 1, -1], dtype=torch.int32)


def experts_tape(router: Weights, experts: ExpertWeights = EXPERTS, places: Tensor | None = None) -> TapeBuilder:
    """hidden → itself plus what two of five experts make of it."""
    t = TapeBuilder()
    hidden, logits = t.value(HIDDEN, INPUT), t.value(5, SCRATCH, size=4)
    ids, factors, out = t.value(2, SCRATCH, size=4), t.value(2, SCRATCH, size=4), t.value(HIDDEN, RESULT)
    t.matrix(router, (hidden, 0), (logits, 0))
    t.route(5, 2, (logits, 0), (ids, 0), (factors, 0))
    t.experts(experts, 2, (hidden, 0), (ids, 0), (factors, 0), (out, 0), (hidden, 0), places)
    return t


@pytest.mark.parametrize("router", [ROUTER, FLOAT_ROUTER], ids=["bfloat16", "float32"])
@pytest.mark.parametrize(("w", "places"), [(EXPERTS, None), (PART, PLACES)], ids=["all", "some"])
def test_routes_and_experts_are_steps(ops: LinearOps, router: Weights, w: ExpertWeights, places: Tensor | None) -> None:
    tape = experts_tape(router, w, places).make(ops)
    for rows in (1, 3, 300, 0, 2):
        x = rand(rows, HIDDEN)
        ids, factors = ops.route(linear(ops, router, x), int(Routing.CHOSEN_SOFTMAX), 2, False, None, 1, 1, 1.0)
        formats = int(w.gate_up_format), int(w.down_format)
        given = (x, ids, factors, w.gate_up, w.down, w.inner, *formats, None, None, places, x, 1, 0.0, 0.0, 0)
        (found,) = run_tape(ops, tape, [x])
        assert torch.equal(found, ops.packed_experts(*given))


def test_values_of_another_size_are_refused(ops: LinearOps) -> None:
    t = experts_tape(ROUTER)
    program = t.program
    assert program[6] == 4, "bytes of a logit"
    program[6] = 2
    with pytest.raises(RuntimeError, match="make_tape: value 1 has elements of another size than 4"):
        t.make(ops, program)
    t = TapeBuilder()
    t.value(HIDDEN, INPUT), t.value(3, SCRATCH, size=4), t.value(HIDDEN, RESULT)
    t.experts(EXPERTS, 2, (0, 0), (1, 0), (1, 1), (2, 0), NONE)
    with pytest.raises(RuntimeError, match="make_tape: ids and weights must be whole values"):
        t.make(ops)
