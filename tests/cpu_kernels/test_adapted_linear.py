"""A packed layer with adapters is the packed layer, the operator of torch, and what comes behind."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from engine.adapters.config import BLOCK
from engine.adapters.linear import AdaptedLinear, AdaptedPacked, Place, Room
from engine.adapters.peft import Factors
from engine.adapters.tables import StepAdapters
from engine.adapters.targets import Own
from engine.adapters.writing import write
from engine.cpu_kernels.formats import Format
from engine.cpu_kernels.linear import LinearOps, interleave_gate_up, pack_bf16
from engine.models.layers import Linear, RMSNorm
from engine.models.packed import PackedLinear
from engine.models.taken import Taken

SLOTS, MAX_RANK, MOST = 4, 24, 40
BF16, CPU = torch.bfloat16, torch.device("cpu")


def layers(
    ops: LinearOps, k: int, ends: tuple[int, ...], gated: bool, bias: bool, step: StepAdapters
) -> tuple[AdaptedPacked, AdaptedLinear]:
    """The same layer, packed and dense, with the same adapters: slot 0 has none of the first part's, slot 3 nothing."""
    generator = torch.Generator().manual_seed(k)
    n = ends[-1]

    def random(*shape: int) -> torch.Tensor:
        return (torch.randn(*shape, generator=generator) * shape[-1] ** -0.5).to(BF16)

    dense = Linear(k, n, bias, BF16, CPU, "silu" if gated else None, gated)
    dense.weight.copy_(random(n, k))
    if dense.bias is not None:
        dense.bias.copy_(random(n))
    order = interleave_gate_up if gated else (lambda rows: rows)
    weight = pack_bf16(order(dense.weight))
    packed_bias = None if dense.bias is None else order(dense.bias.detach()).clone()
    packed = PackedLinear(ops, weight, n, k, Format.BFLOAT16, bias=packed_bias, gate="silu" if gated else None)
    place = Place(ends, step.table, SLOTS, MAX_RANK, BF16)
    native, oracle = AdaptedPacked(packed, place), AdaptedLinear(dense, place)
    for slot in range(SLOTS - 1):
        for part, (start, end) in enumerate(zip((0, *ends), ends, strict=False)):
            if rank := int(torch.randint(1, MAX_RANK + 1, (), generator=generator)) * bool(slot or part):
                own = Own("", part, start, end - start, k, Taken())
                factors = Factors(own, random(rank, k), random(end - start, rank), 2.0)
                write(slot, [(native.room(part, start), factors), (oracle.room(part, start), factors)])
    return native, oracle


@pytest.mark.parametrize("rows", [1, 5, 37])
@pytest.mark.parametrize(
    ("k", "ends", "gated", "bias"),
    [
        (64, (64, 96, 128), False, True),
        (98, (45, 50), False, False),
        (96, (96, 192), True, False),
        (64, (33,), False, False),
    ],
)
@pytest.mark.parametrize("norm", [False, True])
@torch.no_grad()
def test_outputs_are_those_of_torch(
    linear_ops: LinearOps, rows: int, k: int, ends: tuple[int, ...], gated: bool, bias: bool, norm: bool
) -> None:
    step = StepAdapters(MOST)
    native, oracle = layers(linear_ops, k, ends, gated, bias, step)
    x = torch.randn(rows, k, generator=torch.Generator().manual_seed(rows)).to(BF16)
    before = RMSNorm(k, 1e-5, BF16, CPU) if norm else None
    if before is not None:
        before.weight.copy_(torch.linspace(0.5, 2.0, k))
    residual = None if gated else torch.randn(rows, ends[-1]).to(BF16)
    slots = np.array([(index * index) % (SLOTS + 1) - 1 for index in range(1, rows + 1)], dtype=np.int32)
    step.set(slots)
    found, expected = native(x, before, residual).float(), oracle(x, before, residual).float()
    torch.testing.assert_close(found, expected, rtol=2e-2, atol=2e-2)
    alone = []
    for row in range(rows):
        step.set(slots[row : row + 1])
        alone.append(native(x[row : row + 1], before, None if residual is None else residual[row : row + 1]))
    assert torch.equal(torch.cat(alone).float(), found), "a row's bits depend on its batch"
    step.set(np.full(rows, -1, dtype=np.int32))
    plain = native(x, before, residual)
    bare = PackedLinear.forward(_packed(linear_ops, native), x, before, residual)
    assert torch.equal(plain, bare)
    changes = bool((native.ranks[slots[slots >= 0]] > 0).any())
    assert torch.equal(plain.float(), found) != changes


def _packed(ops: LinearOps, native: AdaptedPacked) -> PackedLinear:
    packed = PackedLinear(ops, native.weight, native.n, native.a.size(3), Format(native.format), bias=native.bias)
    packed.gate = native.gate
    return packed


@pytest.mark.parametrize("scale", [1.0, 0.3])
@pytest.mark.parametrize("strided", [False, True])
def test_factors_have_the_same_bits_in_blocks_and_in_rows(linear_ops: LinearOps, strided: bool, scale: float) -> None:
    """Wherever a part begins and ends; what is beside it, and beyond its rank, stays."""
    generator, slots, inputs, ends = torch.Generator().manual_seed(7), 3, 10, (5, 64, 65, 200, 333)
    outputs, blocks = ends[-1], -(-ends[-1] // BLOCK)

    def random(*shape: int) -> torch.Tensor:
        found = torch.randn(*shape, generator=generator).to(BF16)
        found[0, 0] = torch.nan
        return found.T.contiguous().T if strided else found

    ranks = [torch.zeros(slots, len(ends), dtype=torch.int32) for _ in range(2)]
    a = [torch.ones(slots, len(ends), MAX_RANK, inputs, dtype=BF16) for _ in range(2)]
    rows = torch.ones(slots, MAX_RANK, outputs, dtype=BF16)
    packed = torch.ones(slots, blocks, MAX_RANK, BLOCK, dtype=BF16)
    written = []
    for part, (start, end) in enumerate(zip((0, *ends), ends, strict=False)):
        if part != 3:
            rank = MAX_RANK - 3 * part
            own = Own("", part, start, end - start, inputs, Taken())
            factors = Factors(own, random(rank, inputs), random(end - start, rank), scale)
            written += [
                (Room(a[0], packed, ranks[0], part, start, linear_ops.write_factors), factors),
                (Room(a[1], rows, ranks[1], part, start), factors),
            ]
    write(1, written)
    found = packed.transpose(2, 3).flatten(1, 2)[:, :outputs].transpose(1, 2)
    for one, other in ((found, rows), (a[0], a[1])):
        torch.testing.assert_close(one, other, rtol=0, atol=0, equal_nan=True)
    assert torch.equal(ranks[0], ranks[1]) and ranks[0][1].tolist() == [24, 21, 18, 0, 12]
    assert (rows[[0, 2]] == 1).all() and (packed[1, -1, :, outputs % BLOCK :] == 1).all()


@pytest.mark.parametrize(
    ("change", "problem"),
    [
        ({"places": torch.tensor([[3, 0, 0]])}, "slot 3"),
        ({"places": torch.tensor([[0, 0, 65]])}, "do not fit"),
        ({"given_a": [torch.zeros(25, 8, dtype=BF16)]}, "do not fit"),
        ({"given_b": [torch.zeros(64, 3, dtype=BF16)]}, "do not fit"),
        ({"given_b": [torch.zeros(64, 4)]}, "bfloat16 matrices"),
        ({"ranks": []}, "different lengths"),
        ({"scales": torch.ones(2)}, "scales"),
        ({"b": [torch.zeros(3, 1, MAX_RANK, 32, dtype=BF16)]}, "not of one layer"),
    ],
)
def test_factors_that_do_not_fit_are_refused(linear_ops: LinearOps, change: dict[str, object], problem: str) -> None:
    given = {
        "a": [torch.zeros(3, 1, MAX_RANK, 8, dtype=BF16)],
        "b": [torch.zeros(3, 2, MAX_RANK, BLOCK, dtype=BF16)],
        "ranks": [torch.zeros(3, 1, dtype=torch.int32)],
        "given_a": [torch.zeros(4, 8, dtype=BF16)],
        "given_b": [torch.zeros(64, 4, dtype=BF16)],
        "places": torch.tensor([[0, 0, 0]]),
        "scales": torch.ones(1),
    }
    with pytest.raises(RuntimeError, match=problem):
        linear_ops.write_factors(**(given | change))
