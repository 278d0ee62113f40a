"""Kernels of states under Triton's interpreter, in a process of its own."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

HERE = Path(__file__).parent


@pytest.mark.parametrize("case", ["move", "convolve", "one_token"])
def test_kernels_equal_torch_under_the_interpreter(case: str) -> None:
    pytest.importorskip("triton")
    paths = os.pathsep.join([str(HERE.parents[1]), os.environ.get("PYTHONPATH", "")])
    environment = {**os.environ, "TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1", "PYTHONPATH": paths}
    command = [sys.executable, str(HERE / "interpret_states.py"), case]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=200)
    assert done.stdout == f"{case} right\n", done.stdout + done.stderr
