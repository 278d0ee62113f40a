"""`compiles_after_ready` sees Triton too: a kernel variant that warm-up missed is no silent stall."""

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
        env={**os.environ, **environment, "PYTHONPATH": str(HERE.parents[1])},
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def test_the_counter_sees_every_kernel_that_triton_loads_and_lets_go_of_triton(tmp_path: Path) -> None:
    pytest.importorskip("triton")
    printed = run([str(HERE / "load_triton_kernel.py")], TRITON_INTERPRET="0", TRITON_CACHE_DIR=str(tmp_path))
    assert printed.split() == ["0", "1", "2", "0", "1"]


def test_the_counter_needs_no_triton_and_nobody_dynamo_before_something_is_compiled() -> None:
    """Dynamo takes as long to import as torch; what it does once it is there is counted from the mark before."""
    code = (
        "import sys; sys.modules['triton'] = None\n"
        "import engine.executor.default\n"
        "import torch\n"
        "from compilation.counter import CompileCounter\n"
        "counter = CompileCounter()\n"
        "print(counter.since_mark(), 'torch._dynamo' in sys.modules, 'sympy' in sys.modules)\n"
        "torch.compile(lambda x: x + 1, backend='eager')(torch.ones(2))\n"
        "print(counter.since_mark())"
    )
    assert run(["-c", code]).split() == ["0", "False", "False", "1"]
