"""Run by test_device_adapters.py in a process of its own: Triton must be imported with TRITON_INTERPRET=1 already set.
The kernels of adapters against the oracle in torch."""

from __future__ import annotations

import numpy as np
import torch

from engine.adapters.device import add_on_device
from engine.adapters.linear import add_adapters
from engine.adapters.tables import StepAdapters


def check(dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    slots, most, inputs, ends = 3, 24, 300, (130, 194, 258)
    a, b = torch.randn(slots, 3, most, inputs).to(dtype) / 16, torch.randn(slots, most, ends[-1]).to(dtype) / 4
    ranks = torch.tensor([[24, 8, 3], [5, 0, 17], [0, 0, 0]], dtype=torch.int32)
    step = StepAdapters(8)
    step.set(np.array([1, -1, 0, 2, 0, -1, 1], dtype=np.int32))
    x, y = torch.randn(7, inputs).to(dtype), torch.randn(7, ends[-1]).to(dtype)
    expected, found, alone = y.clone(), y.clone(), y[2:3].clone()
    add_adapters(expected, x, step.table, a, b, ranks, ends)
    add_on_device(found, x, step.table, a, b, ranks, ends)
    torch.testing.assert_close(found, expected, atol=1e-4 if dtype == torch.float32 else 1e-2, rtol=1e-3)
    assert torch.equal(found[[1, 3, 5]], y[[1, 3, 5]]), "rows without an adapter"
    assert not torch.equal(found[[0, 2, 4, 6]], y[[0, 2, 4, 6]])
    step.set(np.array([0], dtype=np.int32))
    add_on_device(alone, x[2:3], step.table, a, b, ranks, ends)
    assert torch.equal(alone, found[2:3]), "a row's bits do not depend on its batch"


if __name__ == "__main__":
    for each in (torch.float32, torch.float16):
        check(each)
