"""The Triton input kernels: equal to their twin under the interpreter, and compilable for the GPUs that we support."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

HERE = Path(__file__).parent


def run(arguments: list[str], **environment: str) -> str:
    done = subprocess.run(
        [sys.executable, *arguments],
        env={**os.environ, **environment},
        cwd=HERE.parents[1],
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.mark.parametrize("seed", [0, 1])
def test_triton_kernels_equal_their_twins_over_random_grids(seed: int) -> None:
    pytest.importorskip("triton")
    printed = run([str(HERE / "interpret_kernels.py"), str(seed)], TRITON_INTERPRET="1")
    assert printed.count("equal") == 12


def test_one_step_compiles_all_that_steps_of_any_size_and_address_need(tmp_path: Path) -> None:
    pytest.importorskip("triton")
    paths = os.pathsep.join(map(str, (HERE.parents[1], HERE.parent / "compilation")))
    environment = {"TRITON_INTERPRET": "0", "TRITON_CACHE_DIR": str(tmp_path), "PYTHONPATH": paths}
    printed = run([str(HERE / "count_launch_variants.py")], **environment)
    assert printed.splitlines() == ["7 7 7 7", "3 3 3 3", "2 2 2 2"]


def test_a_cpu_engine_needs_no_triton() -> None:
    code = (
        "import sys; sys.modules['triton'] = None\n"
        "import torch; from engine.runner.kernels import select_kernels\n"
        "print(type(select_kernels(torch.device('cpu'))).__name__)"
    )
    assert run(["-c", code]).strip() == "HostKernels"
