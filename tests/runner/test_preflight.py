"""Before a start on CUDA: what is missing is said in one line each, and what works is not refused."""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch
from plan_driver import config

from attention_backends.cuda_build import find_nvcc
from engine import machine
from engine.config import Device, EngineConfig
from engine.errors import ConfigError
from engine.runner import loading, preflight
from engine.runner.preflight import Probes, check_device

GPU = torch.device("cuda", 0)
FINE = Probes(
    driver=lambda: (13, 0),
    runtime=lambda: (13, 0),
    missing_header=lambda: None,
    triton=lambda device: None,
    nvcc=lambda device, cache_dir: None,
    flashinfer_missing=lambda: "not installed",
)


def fails(message: str) -> Callable[..., None]:
    def trial(*_: object) -> None:
        raise RuntimeError(message)

    return trial


def on_cuda(tmp_path: Path, backend: str | None = None) -> EngineConfig:
    plain = config(tmp_path)
    device = msgspec.structs.replace(plain.device, kind="cuda", attention_backend=backend)
    return msgspec.structs.replace(plain, device=device)


def refusal(settings: EngineConfig, **changed: Any) -> list[str]:
    with pytest.raises(ConfigError) as refused:
        check_device(settings, GPU, replace(FINE, **changed))
    return str(refused.value).splitlines()


def test_a_machine_that_has_everything_passes(tmp_path: Path) -> None:
    check_device(on_cuda(tmp_path), GPU, FINE)
    # within one major version an older driver runs what a newer toolkit compiled: the trials decide
    check_device(on_cuda(tmp_path), GPU, replace(FINE, driver=lambda: (12, 2), runtime=lambda: (12, 8)))
    check_device(on_cuda(tmp_path), GPU, replace(FINE, missing_header=lambda: Path("Python.h")))


def test_a_driver_older_than_the_runtime_is_named_before_anything_is_tried(tmp_path: Path) -> None:
    old: dict[str, Any] = {"driver": lambda: (12, 4), "triton": fails("not asked")}
    (line,) = refusal(on_cuda(tmp_path), **old)
    assert "driver serves CUDA up to 12.4, torch was built for 13.0: update the driver" in line
    (line,) = refusal(on_cuda(tmp_path), driver=lambda: (13, 0), runtime=lambda: (13, 1), triton=fails("no image"))
    assert "the driver serves CUDA 13.0, torch was built for 13.1; RuntimeError: no image" in line


def test_each_thing_that_is_missing_is_one_line(tmp_path: Path) -> None:
    page = "\n".join(["gcc failed: " + 2000 * "-I ", *("a line" for _ in range(50)), "fatal error: Python.h"])
    header = Path("/usr/include/python3.11/Python.h")
    lines = refusal(
        on_cuda(tmp_path), triton=fails(page), missing_header=lambda: header, nvcc=fails("no CUDA compiler (nvcc)")
    )
    assert len(lines) == 2 and all(len(line) < 500 for line in lines)
    assert f"Triton cannot compile and run a kernel: {header} is missing" in lines[0]
    assert "fatal error: Python.h" in lines[0]
    assert "attention kernels cannot be compiled and run: RuntimeError: no CUDA compiler (nvcc)" in lines[1]


def test_nvcc_is_needed_only_where_nothing_else_may_serve(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    missing: dict[str, Any] = {"nvcc": fails("no CUDA compiler (nvcc)")}
    assert "no CUDA compiler" in refusal(on_cuda(tmp_path, "cuda"), flashinfer_missing=lambda: None, **missing)[0]
    for backend in ("flashinfer", "reference"):
        check_device(on_cuda(tmp_path, backend), GPU, replace(FINE, **missing))
    assert not caplog.records
    with caplog.at_level(logging.WARNING):
        check_device(on_cuda(tmp_path), GPU, replace(FINE, flashinfer_missing=lambda: None, **missing))
    assert "no CUDA compiler" in caplog.text


def test_a_start_on_cuda_asks_before_it_reads_a_model_and_one_on_a_cpu_does_not(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def described(path: str, model_impl: str) -> None:
        raise LookupError("the model is read")

    monkeypatch.setattr(loading, "describe", described)
    monkeypatch.setattr(preflight, "PROBES", replace(FINE, triton=fails("no device")))
    with pytest.raises(ConfigError, match="Triton cannot compile and run a kernel"):
        loading.load_parts(on_cuda(tmp_path))
    with pytest.raises(LookupError):
        loading.load_parts(config(tmp_path))


@pytest.mark.skipif(find_nvcc() is None, reason="no CUDA compiler")
def test_the_trial_kernel_compiles_once_and_what_stops_it_is_the_missing_device(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if torch.cuda.is_available():
        pytest.skip("the trial itself runs here, at every start")
    tmp_path.chmod(0o700)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
    for _ in range(2):
        with pytest.raises((RuntimeError, AssertionError), match=r"CUDA|NVIDIA|cuda"):
            preflight._try_nvcc(GPU, tmp_path)
        (library,) = (tmp_path / "preflight").glob("*.so")
        written = library.stat().st_mtime_ns
    assert library.stat().st_mtime_ns == written


@pytest.mark.parametrize("device", ["cuda", "auto", "cpu"])
def test_a_machine_whose_driver_is_too_old_says_so_where_a_gpu_was_wanted(
    device: Device, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """torch finds no device then, and does not say why."""
    monkeypatch.setattr(machine, "driver_is_there", lambda: True)
    monkeypatch.setattr(machine, "_cuda_devices", lambda: ())
    monkeypatch.setattr(machine, "driver_version", lambda: (12, 4))
    monkeypatch.setattr(machine, "runtime_version", lambda: (13, 0))
    with caplog.at_level(logging.WARNING):
        problem = machine.probe_machine(device).cuda_problem
    assert (problem is not None and "CUDA up to 12.4" in problem) == (device != "cpu")
    assert ("device='auto' takes the CPU, because the NVIDIA driver" in caplog.text) == (device == "auto")
