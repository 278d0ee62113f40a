"""Compiles the CPU kernels with the system's C++ compiler: one source, several instruction sets."""

from __future__ import annotations

import platform
import subprocess
from collections.abc import Sequence
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

COMPILE_TIMEOUT_S = 300
FOLDER = "attention-cpu"

_LANGUAGE = ("-std=c++20", "-fPIC", "-fvisibility=hidden", "-w")
_COMMON = (*_LANGUAGE, "-fno-math-errno", "-fno-trapping-math", "-fno-strict-aliasing")
_AVX512 = ("-mavx512f", "-mavx512bw", "-mavx512vl", "-mavx512dq", "-mfma", "-mf16c")
# Not -march=native: the library may be cached on a shared disk and loaded by another CPU.
_X86_VARIANTS: dict[str, tuple[str, ...]] = {
    "avx2": ("-mavx2", "-mfma", "-mf16c"),
    "avx512": _AVX512,
    "avx512bf16": (*_AVX512, "-mavx512bf16"),
    "amx": (*_AVX512, "-mavx512bf16", "-mamx-tile", "-mamx-bf16"),
}
_KERNEL_SOURCE = {"amx": "amx_kernel.cpp"}
_LINK = ("-shared", "-Wl,--no-as-needed")


def find_cached(cache_dir: Path) -> KernelLibrary | None:
    """A library built from exactly these sources for this torch, by whatever compiler; needs no compiler itself."""
    found = sorted((cache_dir / FOLDER).glob(f"{_source_key()}_*.so"))
    return _library(found[0]) if found else None


def build(cache_dir: Path, compiler: str | None = None) -> KernelLibrary:
    """The library from the cache, or compiled now (seconds). Safe against concurrent builds in other processes.

    Raises BuildError: no compiler and nothing cached, or the compiler failed.
    """
    compiler = compiler or find_compiler()
    if compiler is None:
        if (cached := find_cached(cache_dir)) is not None:
            return cached
        raise BuildError(f"no C++ compiler (g++, c++, clang++) on PATH, and no built library under {cache_dir}")
    target = cache_dir / FOLDER / f"{_source_key()}_{version_hash(compiler)}.so"
    build_once(target, lambda scratch: _compile(compiler, _library(target).namespace, scratch))
    return _library(target)


def _library(path: Path) -> KernelLibrary:
    return KernelLibrary(path, f"pageloom_cpu_{path.stem}")


def _source_key() -> str:
    settings = (_COMMON, _X86_VARIANTS, _LINK, torch.__version__, platform.machine())
    return hash_of(settings, (*sorted(CSRC.glob("*.cpp")), *sorted(CSRC.glob("*.h"))))


def _compile(compiler: str, namespace: str, scratch: Path) -> Path:
    variants = {name: flags for name, flags in _variants().items() if _accepts(compiler, flags)}
    units: list[tuple[str, str, Sequence[str]]] = [
        (
            f"kernel_{name}",
            _KERNEL_SOURCE.get(name, "attention_kernel.cpp"),
            ("-O3", *flags, f"-DPAGELOOM_KERNELS=kernels_{name}"),
        )
        for name, flags in variants.items()
    ]
    have = [f"-DPAGELOOM_HAVE_{name.upper()}" for name in variants]
    units.append(("binding", "binding.cpp", ("-O2", f"-DPAGELOOM_OPS={namespace}", *have, *TORCH_INCLUDE)))
    units.append(("schedule", "schedule.cpp", ("-O3",)))
    objects = [str(scratch / f"{name}.o") for name, _, _ in units]
    commands = [
        [compiler, *_COMMON, *flags, "-c", str(CSRC / source), "-o", output]
        for (_, source, flags), output in zip(units, objects, strict=True)
    ]
    run_all(commands, COMPILE_TIMEOUT_S)
    built = scratch / "library.so"
    run([compiler, *objects, "-o", str(built), *_LINK, *TORCH_LIBRARIES], COMPILE_TIMEOUT_S)
    return built


def _variants() -> dict[str, tuple[str, ...]]:
    """Widest first: those take longest to compile."""
    on_x86 = platform.machine() in ("x86_64", "AMD64")
    return {**(dict(reversed(_X86_VARIANTS.items())) if on_x86 else {}), "portable": ()}


def _accepts(compiler: str, flags: Sequence[str]) -> bool:
    """Whether the compiler knows these options; an older one is no error, the variant is left out."""
    command = [compiler, *flags, "-x", "c++", "-fsyntax-only", "/dev/null"]
    return subprocess.run(command, capture_output=True, timeout=60).returncode == 0
