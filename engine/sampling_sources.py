"""The library of sampling kernels on CPUs: its sources, as `native_build` wants them. Outside of `engine.sampling`,
whose import brings torch: libraries are built where there is none."""

from __future__ import annotations

from pathlib import Path

from attention_backends.native_build import NativeSources, Unit
from attention_backends.toolchain import CSRC as SHARED_CSRC

CSRC = Path(__file__).parent / "sampling" / "csrc"

_SHARED = ("crew.h", "lent_threads.h", "simd.h", "torch_abi.h")


def sources() -> NativeSources:
    return NativeSources(
        folder="sampling-cpu",
        prefix="pageloom_sampling",
        units=(
            Unit(CSRC / "sampling_binding.cpp", optimise="-O2"),
            Unit(CSRC / "sampling_kernel.cpp", ("portable", "avx2", "avx512")),
        ),
        headers=(*sorted(CSRC.glob("*.h")), *(SHARED_CSRC / name for name in _SHARED)),
        include=(SHARED_CSRC,),
    )
