"""The Triton page kernels: equal to their twin under the interpreter, all of them known to the ahead-of-time check."""

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
def test_triton_kernels_equal_their_twins_bit_by_bit(seed: int) -> None:
    pytest.importorskip("triton")
    printed = run([str(HERE / "interpret_page_kernels.py"), str(seed)], TRITON_INTERPRET="1")
    assert printed.count("equal") == 10


def test_the_backend_imports_neither_triton_nor_flashinfer_before_prepare() -> None:
    code = (
        "import sys; sys.modules['triton'] = sys.modules['flashinfer'] = None\n"
        "import torch; from attention_backends.flashinfer import FlashInferBackend\n"
        "from attention_backends.page_kernels import select_kernels\n"
        "print(FlashInferBackend().capabilities().capture_safe, type(select_kernels(torch.device('cpu'))).__name__)"
    )
    assert run(["-c", code]).strip() == "True HostKernels"
