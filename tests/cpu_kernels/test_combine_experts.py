"""The last stage of a mixture of experts alone, of rows that were made elsewhere."""

from __future__ import annotations

from functools import partial

import pytest
import torch
from expert_oracle import choices, make_case, normal, run
from torch import Tensor

from attention_backends.native_build import ISAS
from engine.cpu_kernels.formats import Format
from engine.cpu_kernels.linear import LinearOps


def _rows(tokens: int, hidden: int, seed: int) -> Tensor:
    return normal(tokens, hidden, seed=seed).bfloat16()


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("format", [Format.BFLOAT16, Format.INT8], ids=lambda format: format.name)
def test_choices_that_were_made_one_by_one_are_combined_to_the_same_bits(
    linear_ops: LinearOps, format: Format, isa: str
) -> None:
    """Wherever they lie, for one thread's tokens and for several's."""
    if isa not in linear_ops.isas:
        pytest.skip(f"this CPU has no {isa}")
    number, case = ISAS.index(isa) + 1, make_case(format)
    for tokens in (0, 1, 5, 260):
        rows = partial(_rows, tokens, case.weights.hidden)
        x, (ids, weights), residual = rows(7), choices(tokens, case.experts, 3), rows(9)
        ones = torch.ones(3 * tokens, 1)
        made = run(linear_ops, case, x.repeat_interleave(3, dim=0), ids.view(-1, 1), ones, number)
        order = torch.randperm(3 * tokens, generator=torch.Generator().manual_seed(2))
        positions = torch.argsort(order).int().view(-1, 3)
        for beside in (None, residual):
            found = linear_ops.combine_experts(made[order], positions, weights, beside, number)
            assert torch.equal(found, run(linear_ops, case, x, ids, weights, number, residual=beside))
    some = torch.tensor([[0, -1, 2]], dtype=torch.int32)
    without = linear_ops.combine_experts(made[:3], some, weights[:1], None, number)
    zeroed = linear_ops.combine_experts(made[:3], some.abs(), weights[:1] * torch.tensor([1.0, 0.0, 1.0]), None, number)
    assert torch.equal(without, zeroed)
    with pytest.raises(RuntimeError, match=r"position 3 is outside \[-1, 3\)"):
        linear_ops.combine_experts(made[:3], some + 1, weights[:1], None, number)
