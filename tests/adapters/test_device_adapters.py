"""Adapters on GPUs: the Triton kernels by the interpreter, and engines on a pretend GPU, in processes of their own."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("triton")
HERE = Path(__file__).parent
MODES = [
    ("pieces", "both"),
    # Graphs of pieces and of whole decode steps are both in `both`, behind steps that are none.
    *(
        pytest.param(*mode, marks=pytest.mark.exhaustive)
        for mode in (("none", "none"), ("pieces", "piecewise"), ("none", "full_decode"))
    ),
]


def run(script: str, *arguments: str) -> None:
    paths = os.pathsep.join(map(str, (HERE.parents[1], *sys.path)))
    environment = {**os.environ, "TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1", "PYTHONPATH": paths}
    command = [sys.executable, str(HERE / script), *arguments]
    done = subprocess.run(command, env=environment, capture_output=True, text=True)
    assert not done.returncode, done.stderr[-4000:]


def test_device_operator_is_the_oracle() -> None:
    run("interpret_adapters.py")


@pytest.mark.parametrize(("compile", "graphs"), MODES)
def test_tokens_on_a_pretend_gpu_are_a_cpus(compile: str, graphs: str, tmp_path: Path) -> None:
    run("pretend_adapters.py", str(tmp_path), compile, graphs)
