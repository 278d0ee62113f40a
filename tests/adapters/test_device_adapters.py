"""The Triton kernels of adapters against the oracle in torch, by the interpreter."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch

from engine.adapters.linear import add_adapters
from engine.adapters.tables import StepAdapters

pytest.importorskip("triton")


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_device_operator_is_the_oracle(dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    from engine.adapters.device import add_on_device

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
    step.set(np.array([0], dtype=np.int32))
    add_on_device(alone, x[2:3], step.table, a, b, ranks, ends)
    assert torch.equal(alone, found[2:3]), "a row's bits do not depend on its batch"


@pytest.mark.parametrize(("compile", "graphs"), [("none", "none"), ("pieces", "piecewise"), ("pieces", "both")])
def test_tokens_on_a_pretend_gpu_are_a_cpus(compile: str, graphs: str, tmp_path: Path) -> None:
    script = Path(__file__).with_name("pretend_adapters.py")
    command = [sys.executable, str(script), str(tmp_path), compile, graphs]
    done = subprocess.run(command, env={**os.environ, "TRITON_INTERPRET": "1"}, capture_output=True, text=True)
    assert not done.returncode, done.stderr[-4000:]
