"""The Triton page kernels: equal to their twin under the interpreter, all of them known to the ahead-of-time check."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from attention_backends.page_kernels import KERNELS

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


def test_every_triton_kernel_is_in_the_discovery_table_with_all_its_parameters() -> None:
    pytest.importorskip("triton")
    code = (
        "import triton; from attention_backends.page_kernels import device; "
        "jitted = triton.runtime.jit.JITFunction; "
        "print(*(n + ':' + ','.join(v.arg_names) "
        "for n, v in vars(device).items() if isinstance(v, jitted) and n[0] != '_'))"
    )
    found = dict(line.split(":") for line in run(["-c", code], TRITON_INTERPRET="0").split())
    assert set(found) == {kernel.name for kernel in KERNELS}
    for kernel in KERNELS:
        assert found[kernel.name].split(",") == [*kernel.signature, *kernel.constexprs]


def test_every_kernel_compiles_for_ampere_and_hopper(tmp_path: Path) -> None:
    pytest.importorskip("triton")
    code = """
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from attention_backends.page_kernels import KERNELS, device
for kernel in KERNELS:
    constexprs = dict.fromkeys(kernel.constexprs, "constexpr")
    source = ASTSource(getattr(device, kernel.name), {**kernel.signature, **constexprs}, dict(kernel.constexprs))
    for capability in (80, 90):
        print(len(triton.compile(source, target=GPUTarget("cuda", capability, 32)).asm["cubin"]), "bytes")
"""
    printed = run(["-c", code], TRITON_INTERPRET="0", TRITON_CACHE_DIR=str(tmp_path))
    assert printed.count("bytes") == 2 * len(KERNELS)


def test_the_backend_imports_neither_triton_nor_flashinfer_before_prepare() -> None:
    code = (
        "import sys; sys.modules['triton'] = sys.modules['flashinfer'] = None\n"
        "import torch; from attention_backends.flashinfer import FlashInferBackend\n"
        "from attention_backends.page_kernels import select_kernels\n"
        "print(FlashInferBackend().capabilities().capture_safe, type(select_kernels(torch.device('cpu'))).__name__)"
    )
    assert run(["-c", code]).strip() == "True HostKernels"
