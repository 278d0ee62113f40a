"""Device kernels against what they must equal: input kernels and their twins, seeded draws and the CPU's; and every
test that is marked `gpu`."""

from __future__ import annotations

import re
import subprocess
import sys
from typing import Any

import numpy as np
import torch

from gpu.context import ROOT, Context, UnavailableError, load_test_module


class OnDevice:
    """Kernels that are handed CPU tensors: runs them on copies on the device, then brings every tensor back."""

    def __init__(self, kernels: Any, device: torch.device) -> None:
        self._kernels, self._device = kernels, device

    def __getattr__(self, name: str) -> Any:
        method = getattr(self._kernels, name)

        def call(*arguments: Any) -> None:
            moved = [self._moved(a) for a in arguments]
            method(*moved)
            for original, copy in zip(arguments, moved, strict=True):
                self._bring_back(original, copy)

        return call

    def _moved(self, value: Any) -> Any:
        if isinstance(value, torch.Tensor):
            return value.to(self._device, copy=True)
        if hasattr(value, "__dataclass_fields__") and any(isinstance(v, torch.Tensor) for v in vars(value).values()):
            return type(value)(**{k: self._moved(v) for k, v in vars(value).items()})
        return value

    def _bring_back(self, original: Any, copy: Any) -> None:
        if isinstance(original, torch.Tensor):
            original.copy_(copy)
        elif original is not copy:
            for name, value in vars(original).items():
                self._bring_back(value, getattr(copy, name))


def run_inputs(context: Context) -> None:
    """Part `input kernels`: the tests' own comparison with the twins, Triton's side on the device."""
    twins: Any = load_test_module("runner", "interpret_kernels")
    kernels = twins.TritonKernels
    twins.TritonKernels = lambda **sizes: OnDevice(kernels(**sizes), context.device.torch_device)
    rng = np.random.default_rng(0)
    for case in range(2 if context.dry else 40):
        problem = None
        try:
            twins.check_prepare_and_gather(rng, case)
            for dtype in (torch.int32, torch.int64, torch.float32):
                twins.check_staged_writes(rng, dtype)
            twins.check_post_update(rng)
        except AssertionError as error:
            problem = str(error) or "differs"
        context.check(f"input kernels, case {case}", problem)


def run_sampling(context: Context) -> None:
    """Part `sampling`: seeded draws on the device are the CPU's."""
    parity = load_test_module("sampling", "device_parity")
    try:
        sizes: Any = {"vocabs": (257,), "draws": 4, "copies": 1, "steps": 1} if context.dry else {}
        parity.check(context.device.torch_device, **sizes)
    except AssertionError as error:
        context.check("seeded sampling equals the CPU's", str(error) or "differs")
    else:
        context.check("seeded sampling equals the CPU's", None)


def run_marked_tests(context: Context) -> None:
    """Part `tests marked gpu`: by pytest; a dry run only collects them."""
    # Other test files may need packages that this machine does not have.
    files = [str(path) for path in sorted((ROOT / "tests").rglob("test_*.py")) if "mark.gpu" in path.read_text()]
    if not files:
        context.skipped("tests marked gpu", "there are none")
        return
    command = [sys.executable, "-m", "pytest", "-m", "gpu", "-p", "no:cacheprovider", "-q", "--no-header"]
    command += ["--tb=short", "--show-capture=no", "-W", "ignore", *files]
    if context.dry:
        command.append("--collect-only")
    try:
        done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=max(1.0, context.left_s()))
    except subprocess.TimeoutExpired:
        raise UnavailableError("the tests did not end in the time that was left") from None
    if "No module named pytest" in done.stderr:
        raise UnavailableError("pytest is not installed")
    counts = {word: int(number) for number, word in re.findall(r"(\d+) (passed|failed|skipped|error)", done.stdout)}
    context.figure("tests_marked_gpu", counts)
    tail = "\n".join((done.stdout + done.stderr).splitlines()[-40:])
    context.check("tests marked gpu", None if done.returncode == 0 else tail)
