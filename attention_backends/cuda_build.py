"""Compiles the CUDA kernels with nvcc, for one device and one kind of attention: nothing is compiled that is not used.

nvcc sees the torch-free kernels, the C++ compiler sees torch's headers, and neither sees the other's.
"""

from __future__ import annotations

import shutil
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from attention_backends.toolchain import (
    CSRC,
    TORCH_INCLUDE,
    TORCH_LIBRARIES,
    BuildError,
    KernelLibrary,
    build_once,
    find_compiler,
    hash_of,
    run,
    run_all,
    version_hash,
)

SOURCES = CSRC / "cuda"
FOLDER = "attention-cuda"
COMPILE_TIMEOUT_S = 900
NVCC_FLAGS = ("-std=c++20", "-O3", "-Xcompiler=-fPIC,-fvisibility=hidden")
HOST_FLAGS = ("-std=c++20", "-O2", "-fPIC", "-fvisibility=hidden", "-w")
# The runtime is linked in, so nothing depends on which libcudart torch brought. Both runtimes work in the device's one
# primary context, and a stream is the driver's own handle; the current device is a property of the thread's context,
# which torch's guard sets. What each keeps for itself is its last error: torch never sees one of ours.
_LINK = ("-shared", "-cudart=static", "-Xlinker=--no-as-needed")
_HALF_NAMES = {torch.bfloat16: "bf16", torch.float16: "f16"}


@dataclass(frozen=True)
class CudaKernels:
    """What one library serves. Raises ValueError for types that there are no kernels for."""

    head_dim: int
    dtype: torch.dtype
    kv_dtype: torch.dtype
    capability: tuple[int, int]
    """compute capability of the device, such as (9, 0)"""

    def __post_init__(self) -> None:
        if self.dtype not in _HALF_NAMES or self.kv_dtype not in (self.dtype, torch.float8_e4m3fn):
            raise ValueError(f"no CUDA attention kernels for {self.dtype} queries with a {self.kv_dtype} cache")

    @property
    def architecture(self) -> str:
        """What follows `sm_`; Hopper's own instructions need the `a`."""
        return "90a" if self.capability == (9, 0) else f"{self.capability[0]}{self.capability[1]}"

    @property
    def macros(self) -> tuple[str, ...]:
        """As launch.h names them."""
        return (
            f"-DPAGELOOM_HEAD_DIM={self.head_dim}",
            f"-DPAGELOOM_HALF={int(self.dtype == torch.float16)}",
            f"-DPAGELOOM_KV_FP8={int(self.kv_dtype == torch.float8_e4m3fn)}",
            f"-DPAGELOOM_SHARED_KIB={shared_kib(self.capability)}",
        )

    @property
    def tag(self) -> str:
        cache = "_fp8" if self.kv_dtype == torch.float8_e4m3fn else ""
        return f"sm{self.architecture}_h{self.head_dim}_{_HALF_NAMES[self.dtype]}{cache}"


def shared_kib(capability: tuple[int, int]) -> int:
    """Shared memory that a thread block may have, from CUDA's table of compute capabilities; what the table does not
    name yet is taken to have the least."""
    if capability[0] in (9, 10, 11):
        return 227
    return 163 if capability in ((8, 0), (8, 7)) else 99


def find_nvcc() -> str | None:
    """The CUDA compiler on PATH, or where its installers and its wheels put it."""
    site = Path(torch.__file__).parent.parent / "nvidia"
    wheels = sorted((*site.glob("cu*/bin"), *site.glob("cuda_nvcc/bin")), reverse=True)
    places = [None, "/usr/local/cuda/bin", "/opt/cuda/bin", *map(str, wheels)]
    return next((found for place in places if (found := shutil.which("nvcc", path=place))), None)


def translation_units() -> list[Path]:
    return sorted(SOURCES.glob("*.cu"))


def nvcc_command(
    nvcc: str, source: Path, output: Path, macros: Sequence[str], architectures: Sequence[str]
) -> list[str]:
    """Compiles one unit to an object file with machine code for each architecture ("80", "90a")."""
    targets = [f"-gencode=arch=compute_{each},code=sm_{each}" for each in architectures]
    include = (f"-I{SOURCES}", f"-I{SOURCES / 'device'}")
    return [nvcc, *NVCC_FLAGS, *targets, *include, *macros, "-c", str(source), "-o", str(output)]


def binding_command(compiler: str, output: Path, kernels: CudaKernels, namespace: str) -> list[str]:
    """Compiles the binding to an object file, against the headers of any build of torch (CPU ones too)."""
    macros = (f"-DPAGELOOM_OPS={namespace}", *kernels.macros)
    source = str(SOURCES / "binding.cpp")
    return [compiler, *HOST_FLAGS, *TORCH_INCLUDE, *macros, "-c", source, "-o", str(output)]


def find_cached(cache_dir: Path, kernels: CudaKernels | None = None) -> list[KernelLibrary]:
    """Libraries built from exactly these sources for this torch, by whatever compilers; None: for any device and
    kind."""
    tag = "*" if kernels is None else kernels.tag
    return [_library(path) for path in sorted((cache_dir / FOLDER).glob(f"{_source_key()}_{tag}_????????.so"))]


def build(cache_dir: Path, kernels: CudaKernels, nvcc: str | None = None, compiler: str | None = None) -> KernelLibrary:
    """The library from the cache, or compiled now (about a minute). Safe against concurrent builds in other processes.

    Raises BuildError: a compiler is missing and nothing is cached, or one failed.
    """
    nvcc, compiler = nvcc or find_nvcc(), compiler or find_compiler()
    if nvcc is None or compiler is None:
        if cached := find_cached(cache_dir, kernels):
            return cached[0]
        missing = "CUDA compiler (nvcc) on PATH or in /usr/local/cuda" if nvcc is None else "C++ compiler on PATH"
        raise BuildError(f"no {missing}, and no built library for {kernels.tag} under {cache_dir}")
    versions = version_hash(nvcc)[:4] + version_hash(compiler)[:4]
    target = cache_dir / FOLDER / f"{_source_key()}_{kernels.tag}_{versions}.so"
    build_once(target, lambda scratch: _compile(nvcc, compiler, kernels, _library(target).namespace, scratch))
    return _library(target)


def _library(path: Path) -> KernelLibrary:
    return KernelLibrary(path, f"pageloom_cuda_{path.stem}")


def _source_key() -> str:
    sources = sorted(path for path in SOURCES.rglob("*") if path.is_file())
    return hash_of((NVCC_FLAGS, HOST_FLAGS, _LINK, torch.__version__), sources)


def _compile(nvcc: str, compiler: str, kernels: CudaKernels, namespace: str, scratch: Path) -> Path:
    units = translation_units()
    objects = [scratch / f"{unit.stem}.o" for unit in units]
    commands = [
        nvcc_command(nvcc, unit, output, kernels.macros, [kernels.architecture])
        for unit, output in zip(units, objects, strict=True)
    ]
    objects.append(scratch / "binding.o")
    commands.append(binding_command(compiler, objects[-1], kernels, namespace))
    run_all(commands, COMPILE_TIMEOUT_S)
    built = scratch / "library.so"
    run([nvcc, *_LINK, *map(str, objects), "-o", str(built), *TORCH_LIBRARIES], COMPILE_TIMEOUT_S)
    return built
