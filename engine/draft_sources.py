"""The library that looks for drafts on CPUs: its sources, as `native_build` wants them. Outside of
`engine.runner.kernels`, whose import brings torch: libraries are built where there is none."""

from __future__ import annotations

from pathlib import Path

from attention_backends.native_build import NativeSources, Unit
from attention_backends.toolchain import CSRC as SHARED_CSRC

CSRC = Path(__file__).parent / "runner" / "kernels" / "csrc"


def sources() -> NativeSources:
    return NativeSources(
        folder="drafts-cpu",
        prefix="pageloom_drafts",
        units=(
            Unit(CSRC / "drafts_binding.cpp", optimise="-O1"),
            Unit(CSRC / "drafts_kernel.cpp", ("portable", "avx2", "avx512")),
        ),
        headers=(CSRC / "drafts.h", *(SHARED_CSRC / name for name in ("crew.h", "lent_threads.h", "torch_abi.h"))),
        include=(SHARED_CSRC,),
    )
