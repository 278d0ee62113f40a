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
            Unit(CSRC / "attention_kernel.cpp", _VECTOR_ISAS, always=("avx2",)),
            Unit(CSRC / "binding.cpp", optimise="-O2"),
            Unit(CSRC / "cache.cpp"),
            Unit(CSRC / "plan.cpp"),
            Unit(CSRC / "schedule.cpp"),
        ),
        headers=tuple(sorted(CSRC.glob("*.h"))),
    )


def find_cached(cache_dir: Path) -> KernelLibrary | None:
    """See `native_build.find_cached`."""
    whole = native_build.find_cached(sources(), cache_dir)
    return whole or native_build.find_cached(sources().for_this_cpu(), cache_dir)


def build(cache_dir: Path, compiler: str | None = None, *, every_isa: bool = True) -> KernelLibrary:
    """See `native_build.build`. Not `every_isa`: only what this CPU takes. Raises BuildError."""
    make = native_build.build if every_isa else native_build.build_for_this_cpu
    return make(sources(), cache_dir, compiler)
