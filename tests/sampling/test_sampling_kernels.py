"""The Triton sampler: equal to the torch path under the interpreter, and described truthfully to the compiler check."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from sampling_oracle import CPU

from engine.sampling import Sampler
from engine.sampling.kernels import KERNELS
from engine.step import RowParams

HERE = Path(__file__).parent
PATHS = [HERE, HERE.parent / "compilation", HERE.parents[1]]
PARTS = [("rows", "filters"), ("mixed", "chunks", "seeds")]


def run(arguments: list[str], **environment: str) -> str:
    done = subprocess.run(
        [sys.executable, "-W", "ignore", *arguments],
        env={**os.environ, **environment, "PYTHONPATH": os.pathsep.join(map(str, PATHS))},
        cwd=HERE.parents[1],
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.mark.parametrize("parts", PARTS, ids="-".join)
def test_triton_sampler_draws_the_tokens_of_the_torch_path(parts: tuple[str, ...]) -> None:
    pytest.importorskip("triton")
    printed = run([str(HERE / "interpret_sampling.py"), *parts], TRITON_INTERPRET="1")
    assert [line.split()[:2] for line in printed.splitlines()] == [[part, "equal"] for part in parts]


def test_integers_that_change_between_steps_are_not_part_of_the_compiled_code() -> None:
    pytest.importorskip("triton")
    code = (
        "from engine.sampling.kernels import KERNELS, device\n"
        "for k in KERNELS:\n"
        "    skipped = {p.name for p in getattr(device, k.name).params if p.do_not_specialize}\n"
        "    assert {n for n, t in k.signature.items() if t[0] != '*'} <= skipped, k.name\n"
        "print('done')"
    )
    assert run(["-c", code]).strip() == "done"


def test_after_warm_up_no_batch_at_any_address_compiles_another_variant(tmp_path: Path) -> None:
    pytest.importorskip("triton")
    printed = run([str(HERE / "count_variants.py")], TRITON_INTERPRET="0", TRITON_CACHE_DIR=str(tmp_path))
    assert printed.splitlines() == 2 * [f"{len(KERNELS)} 0"]


def test_a_cpu_sampler_needs_no_triton_and_its_warm_up_leaves_no_trace() -> None:
    code = (
        "import sys; sys.modules['triton'] = None\n"
        "import torch; from engine.sampling import Sampler\n"
        "Sampler(1, 100, torch.device('cpu'), 8).warm_up()\n"
        "print('done')"
    )
    assert run(["-c", code]).strip() == "done"
    sampler = Sampler(2, 100, CPU, 8)
    sampler.add(0, RowParams(seed=0), [1], 1)
    writes, memory = sampler.drain_writes(), sampler.workspace_bytes
    sampler.warm_up()
    assert writes and sampler.drain_writes() == []
    assert sampler.workspace_bytes == memory and not any(bool(t.any()) for t in sampler.tables())


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
def test_a_cuda_device_draws_what_the_cpu_draws_without_a_wait() -> None:
    from device_parity import check, check_no_wait

    device = torch.device("cuda")
    check(device, vocabs=(257, 151_936))
    check_no_wait(device)
