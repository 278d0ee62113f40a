"""`device="cuda"` from `LLM` to the last kernel, on a pretend GPU: what a CPU engine says comes out, in every graph
mode on every backend, and nothing waits for the device where nothing may."""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[2]
WORKLOADS = ROOT / "tests" / "pretend_gpu" / "pretend_cases.py"
LIMIT_S = 1200
PROCESSES = 2

pytestmark = [
    pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="Triton is not installed"),
    pytest.mark.timeout(2 * LIMIT_S),
]

_COMPILE = {"none": "none", "piecewise": "pieces", "full_decode": "none", "both": "pieces"}
_BACKENDS = {"cuda": ("none", "full_decode", "both"), "flashinfer": ("both",), "reference": ("none",)}
"""each mode, compiled and not, and each backend; `both` is `piecewise` in prefill, and `piecewise` alone is that of
`mixed equals the CPU`"""
QUICK = [
    *(
        f"greedy {backend} graphs={graphs} compile={_COMPILE[graphs]}"
        for backend, modes in _BACKENDS.items()
        for graphs in modes
    ),
    "mixed equals the CPU, piecewise",
    "mixed equals the CPU, with drafts",
    "fp8 cache",
    "no hidden wait cuda graphs=both",
    "states: mixed equals the CPU, with drafts",
    "a hidden wait is found",
    "captures between steps",
    "chosen by itself",
    "compiled by Inductor",
    "own linears",
    "experts",
    "chunks",
    "latents, with drafts",
    "packed",
    "experts of the library",
    "invariant",
    "not invariant",
]
EXHAUSTIVE = [
    "invariant, with drafts",
    "invariant, experts",
    "mixed equals the CPU, with eagle3",
    "states: no hidden wait",
    "latents",
    "mixed on cuda",
    "mixed equals the CPU, with draft_model",
    "mixed with drafts on cuda",
    "40 requests of 1 to 6 samples on reference",
    "no hidden wait flashinfer graphs=both",
    "states: mixed equals the CPU, piecewise",
    "latents by the oracle",
    "latents, eager",
    *(
        f"greedy flashinfer graphs={graphs} compile={_COMPILE[graphs]}"
        for graphs in ("none", "piecewise", "full_decode")
    ),
    *(f"greedy {backend} graphs=piecewise compile=pieces" for backend in ("cuda", "reference")),
    *(f"greedy {backend} graphs=none compile=pieces" for backend in _BACKENDS),
    *(f"greedy bfloat16 {backend}" for backend in ("cuda", "flashinfer")),
    "mixed equals the CPU, eager",
    "states: mixed equals the CPU, eager",
    "mixed on flashinfer",
    "mixed with drafts on flashinfer",
    "mixed with draft_model on cuda",
    "mixed with eagle3 on cuda",
    "40 requests of 1 to 6 samples on cuda",
    "40 requests of 1 to 6 samples on flashinfer",
    "no hidden wait cuda graphs=piecewise",
    "no hidden wait cuda graphs=none",
]


class Workloads:
    """Runs the cases that this session asks for, in processes side by side, at the first question."""

    def __init__(self, cases: list[str], folder: Path) -> None:
        self._cases = cases
        self._folder = folder
        self._found: dict[str, str | None] | None = None

    def problem(self, case: str) -> str | None:
        if self._found is None:
            self._found = {}  # if the run is cut off, it is not tried again for every case
            self._found = self._run()
        return self._found.get(case, "the process ended before this case")

    def _run(self) -> dict[str, str | None]:
        environment = os.environ | {"TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}
        command = [sys.executable, str(WORKLOADS), str(self._folder)]
        # The first process makes the model and the kernels that all use.
        subprocess.run([*command, "prepare"], env=environment, cwd=ROOT, check=True, timeout=LIMIT_S)
        running = []
        for i in range(PROCESSES):
            if mine := self._cases[i::PROCESSES]:
                with (self._folder / f"{i}.log").open("w") as log:
                    running.append(
                        subprocess.Popen(
                            [*command, *mine], env=environment, cwd=ROOT, stdout=subprocess.PIPE, stderr=log
                        )
                    )
        found: dict[str, str | None] = {}
        for process in running:
            try:
                out, _ = process.communicate(timeout=LIMIT_S)
            except subprocess.TimeoutExpired:
                process.kill()
                out, _ = process.communicate()
            for line in out.decode().splitlines():
                if line.startswith("{"):
                    entry: dict[str, Any] = json.loads(line)
                    found[entry["case"]] = entry["problem"]
        return found


@pytest.fixture(scope="module")
def workloads(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Workloads:
    asked = [
        item.callspec.params["case"]
        for item in request.session.items
        if isinstance(item, pytest.Function) and item.path == Path(__file__) and hasattr(item, "callspec")
    ]
    return Workloads(asked, tmp_path_factory.mktemp("pretend"))


@pytest.mark.parametrize("case", [*QUICK, *(pytest.param(case, marks=pytest.mark.exhaustive) for case in EXHAUSTIVE)])
def test_on_a_pretend_gpu(workloads: Workloads, case: str) -> None:
    problem = workloads.problem(case)
    assert problem is None, problem
