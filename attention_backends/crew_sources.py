"""The library of the crew on CPUs: its sources, as `native_build` wants them. Without torch, as libraries are built."""

from __future__ import annotations

from attention_backends.native_build import NativeSources, Unit
from attention_backends.toolchain import CSRC


def sources() -> NativeSources:
    return NativeSources(
        folder="crew-cpu",
        prefix="pageloom_crew",
        units=(Unit(CSRC / "crew.cpp", optimise="-O2"),),
        headers=(CSRC / "crew.h", CSRC / "torch_abi.h"),
    )
