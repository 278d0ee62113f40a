"""What Inductor makes of a piece for a GPU, without one: a CUDA build of torch and Triton are enough to compile it."""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

pytestmark = pytest.mark.skipif(
    torch.version.cuda is None or torch.cuda.is_available() or importlib.util.find_spec("triton") is None,
    reason="needs a CUDA build of torch, Triton, and no GPU",
)


def test_a_piece_compiles_into_few_narrow_kernels_that_ask_for_their_stream(tmp_path: Path) -> None:
    here = Path(__file__).parent
    command = [sys.executable, str(here / "generate_for_cuda.py"), str(tmp_path)]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(here), str(here.parents[1])])}
    result = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=300)
    assert result.returncode == 0, result.stderr[-3000:]
    found = json.loads(result.stdout.splitlines()[-1])
    bounded, unbounded = found["bounded"], found["any"]
    assert bounded["matmul"] == 4 and bounded["addmm"] == 0, "residuals are added where they are normalised"
    assert 0 < bounded["triton"] < unbounded["triton"], "a normalisation is one kernel"
    assert not bounded["wide"], "positions fit into 32 bits"
    assert not bounded["autotuned"], "nothing is allocated to time kernels"
    assert bounded["binaries"] >= bounded["triton"] - 1
    assert bounded["streams"] == bounded["triton"], "a graph is captured on another stream than it is replayed on"
