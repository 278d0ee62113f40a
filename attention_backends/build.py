"""The library of paged attention on CPUs: its sources, as `native_build` wants them."""

from __future__ import annotations

from pathlib import Path

from attention_backends import native_build
from attention_backends.native_build import NativeSources, Unit
from attention_backends.toolchain import CSRC, KernelLibrary

_VECTOR_ISAS = ("portable", "avx2", "avx512", "avx512bf16")


def sources() -> NativeSources:
    return NativeSources(
        folder="attention-cpu",
        prefix="pageloom_cpu",
        units=(
            Unit(CSRC / "amx_kernel.cpp", ("amx",)),
            Unit(CSRC / "attention_kernel.cpp", _VECTOR_ISAS),
            Unit(CSRC / "binding.cpp", sees_torch=True, optimise="-O2"),
            Unit(CSRC / "schedule.cpp"),
        ),
        headers=tuple(sorted(CSRC.glob("*.h"))),
    )


def find_cached(cache_dir: Path) -> KernelLibrary | None:
    """See `native_build.find_cached`."""
    return native_build.find_cached(sources(), cache_dir)


def build(cache_dir: Path, compiler: str | None = None) -> KernelLibrary:
    """See `native_build.build`. Raises BuildError."""
    return native_build.build(sources(), cache_dir, compiler)
