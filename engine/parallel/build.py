"""The library of collectives between processes: its sources, as `native_build` wants them. Without torch, as libraries
are built."""

from __future__ import annotations

from pathlib import Path

from attention_backends.native_build import NativeSources, Unit
from attention_backends.toolchain import CSRC as SHARED_CSRC

CSRC = Path(__file__).parent / "csrc"
_SHARED = ("simd.h", "native_group.h", "torch_abi.h", "torch_string.h")


def sources() -> NativeSources:
    return NativeSources(
        folder="parallel-cpu",
        prefix="pageloom_parallel",
        units=(
            Unit(CSRC / "binding.cpp", optimise="-O2"),
            Unit(CSRC / "sums_kernel.cpp", ("portable", "avx2", "avx512")),
            Unit(CSRC / "group.cpp", optimise="-O2"),
            Unit(CSRC / "shared_group.cpp", optimise="-O2"),
            Unit(CSRC / "shared_memory.cpp", optimise="-O2"),
            Unit(CSRC / "socket_group.cpp", optimise="-O2"),
        ),
        headers=(*sorted(CSRC.glob("*.h")), *(SHARED_CSRC / name for name in _SHARED)),
        include=(SHARED_CSRC,),
    )
