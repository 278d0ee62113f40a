"""A few seconds before a model is loaded on CUDA: can this machine compile and run kernels at all? What is missing is
one line, not a compiler's page after minutes.

Trials decide, not version numbers: one Triton kernel and one of nvcc's are compiled, launched and read back. Where one
fails, what is known to be behind it (an older driver, a missing header) leads its line. A driver of an older major
version than torch's runtime is refused without a trial: nothing of torch would run.
"""

from __future__ import annotations

import ctypes
import logging
import sysconfig
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch

from attention_backends.cuda_build import NVCC_FLAGS, find_cached, find_nvcc
from attention_backends.flashinfer_library import why_missing
from attention_backends.toolchain import build_once, hash_of, run, version_hash
from compilation.directory import trusted_directory
from engine.config import EngineConfig
from engine.cuda_versions import Version, dotted, driver_problem, driver_version, runtime_version
from engine.errors import ConfigError
from engine.runner.kernels import select_kernels

logger = logging.getLogger(__name__)

ANSWER = 42
COMPILE_TIMEOUT_S = 60
_MAX_LINE = 200
_SOURCE = """
__global__ void answer(int* to) { *to = 42; }
extern "C" __attribute__((visibility("default"))) const char* pageloom_answer(int* to, void* stream) {
  answer<<<1, 1, 0, static_cast<cudaStream_t>(stream)>>>(to);
  const cudaError_t error = cudaGetLastError();
  return error == cudaSuccess ? nullptr : cudaGetErrorString(error);
}
"""


@dataclass(frozen=True)
class Probes:
    """What is asked of the machine; tests put others in their place."""

    driver: Callable[[], Version | None]
    """the newest CUDA that the driver serves; None: it does not say"""
    runtime: Callable[[], Version | None]
    """the CUDA that torch was built for"""
    missing_header: Callable[[], Path | None]
    """where Python.h should be and is not; Triton compiles its launcher against it"""
    triton: Callable[[torch.device], None]
    """compiles and launches a kernel; raises whatever goes wrong"""
    nvcc: Callable[[torch.device, Path], None]
    """the same by nvcc, keeping what it compiled below a cache directory"""
    flashinfer_missing: Callable[[], str | None]
    """why the attention backend that needs no nvcc of ours cannot serve; None: it may"""


def check_device(config: EngineConfig, device: torch.device, probes: Probes | None = None) -> None:
    """Raises ConfigError, a line for each thing that is missing. What only the in-tree attention kernels need is a
    warning where another backend may serve."""
    probes = probes or PROBES
    driver, runtime = probes.driver(), probes.runtime()
    if (problem := driver_problem(driver, runtime)) is not None:
        raise ConfigError(f"device='cuda': {problem}")
    older = driver is not None and runtime is not None and driver < runtime
    hint = f"the driver serves CUDA {dotted(driver)}, torch was built for {dotted(runtime)}; " if older else ""
    problems = []
    if (error := _failure(lambda: probes.triton(device))) is not None:
        header = probes.missing_header()
        because = f"{header} is missing: install Python's headers (python3-dev); " if header else ""
        problems.append(f"device='cuda': Triton cannot compile and run a kernel: {because}{hint}{error}")
    named = config.device.attention_backend
    if named in (None, "cuda"):
        error = _failure(lambda: probes.nvcc(device, Path(config.compile.cache_dir)))
        if error is not None:
            line = (
                "device='cuda': the in-tree attention kernels cannot be compiled and run: "
                f"{hint}{error} (attention_backend='flashinfer' needs that package instead)"
            )
            if named is None and probes.flashinfer_missing() is None:
                logger.warning("%s", line)
            else:
                problems.append(line)
    if problems:
        raise ConfigError("\n".join(problems))


def _failure(trial: Callable[[], None]) -> str | None:
    """What went wrong, in one line: a compiler's first one is its command, the last ones say most."""
    try:
        trial()
    except Exception as error:
        lines = [line.strip() for line in str(error).splitlines() if line.strip()]
        return f"{type(error).__name__}: {' | '.join(line[:_MAX_LINE] for line in lines[-2:])}"
    return None


def _missing_header() -> Path | None:
    header = Path(sysconfig.get_paths()["include"]) / "Python.h"
    return None if header.is_file() else header


def _try_triton(device: torch.device) -> None:
    """One of the input kernels, which every step needs."""
    tokens = torch.zeros(1, 2, dtype=torch.int32, device=device)
    index = torch.zeros(1, dtype=torch.int64, device=device)
    lengths = torch.zeros(1, dtype=torch.int32, device=device)
    select_kernels(device).post_update(tokens, lengths, index, index + 1, index + ANSWER)
    _check([*tokens.tolist(), lengths.tolist()], [[0, ANSWER], [2]])


def _try_nvcc(device: torch.device, cache_dir: Path) -> None:
    nvcc = find_nvcc()
    if nvcc is None:
        if find_cached(cache_dir):
            return  # compiled before, or elsewhere: the backend finds out whether it fits
        raise FileNotFoundError("no CUDA compiler (nvcc) on PATH or in /usr/local/cuda")
    major, minor = torch.cuda.get_device_capability(device)
    flags = (*NVCC_FLAGS, f"-arch=sm_{major}{minor}", "-shared", "-cudart=static")
    name = f"{hash_of((_SOURCE, flags), ())}_{version_hash(nvcc)}.so"
    target = trusted_directory(trusted_directory(cache_dir.absolute()) / "preflight") / name

    def compile_to(scratch: Path) -> Path:
        source, built = scratch / "answer.cu", scratch / "answer.so"
        source.write_text(_SOURCE)
        run([nvcc, *flags, str(source), "-o", str(built)], COMPILE_TIMEOUT_S)
        return built

    build_once(target, compile_to)
    function = ctypes.CDLL(str(target)).pageloom_answer
    function.restype = ctypes.c_char_p
    found = torch.zeros(1, dtype=torch.int32, device=device)
    stream = torch.cuda.current_stream(device).cuda_stream
    error = function(ctypes.c_void_p(found.data_ptr()), ctypes.c_void_p(stream))
    if error is not None:
        raise RuntimeError(error.decode())
    _check(found.tolist(), [ANSWER])


def _check(found: object, wanted: object) -> None:
    if found != wanted:
        raise RuntimeError(f"a trial kernel computed {found}, not {wanted}")


PROBES = Probes(
    driver=driver_version,
    runtime=runtime_version,
    missing_header=_missing_header,
    triton=_try_triton,
    nvcc=_try_nvcc,
    flashinfer_missing=why_missing,
)
"""this machine's own"""
