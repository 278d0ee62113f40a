"""The library of packed linear layers on CPUs: its sources, as `native_build` wants them."""

from __future__ import annotations

from pathlib import Path

from attention_backends import native_build
from attention_backends.native_build import NativeSources, Unit
from attention_backends.toolchain import CSRC as SHARED_CSRC
from attention_backends.toolchain import KernelLibrary

CSRC = Path(__file__).parent / "csrc"
_QUANTISED_ISAS = ("portable", "avx2", "avx512", "avx512vnni")  # nothing in them multiplies bf16


def sources() -> NativeSources:
    shared = ("crew.h", "lent_threads.h", "native_call.h", "native_group.h", "simd.h", "stages.h", "torch_abi.h")
    return NativeSources(
        folder="linear-cpu",
        prefix="pageloom_linear",
        units=(  # those that take longest first
            Unit(CSRC / "linear_group.cpp", _QUANTISED_ISAS),
            Unit(CSRC / "linear_int8.cpp", (*_QUANTISED_ISAS, "avx512bf16")),  # rounds its outputs
            Unit(CSRC / "binding.cpp", optimise="-O1"),
            Unit(CSRC / "tape_binding.cpp", optimise="-O1"),
            Unit(CSRC / "experts_binding.cpp", optimise="-O1"),
            Unit(CSRC / "states_binding.cpp", optimise="-O1"),
            Unit(CSRC / "linear_amx.cpp", ("amx",), optimise="-O2"),
            Unit(CSRC / "linear_bf16.cpp", ("portable", "avx2", "avx512", "avx512bf16"), "-O2", always=("avx512",)),
            Unit(CSRC / "rotate_heads.cpp", ("portable", "avx2", "avx512", "avx512bf16"), optimise="-O2"),
            Unit(CSRC / "linear_float.cpp", ("portable", "avx2", "avx512"), optimise="-O2"),
            Unit(CSRC / "mix_states.cpp", ("portable", "avx2", "avx512", "avx512bf16"), optimise="-O2"),
            Unit(CSRC / "combine_rows.cpp", ("portable", "avx2", "avx512", "avx512bf16"), optimise="-O2"),
            Unit(CSRC / "adapters.cpp", ("portable", "avx2", "avx512", "avx512bf16"), optimise="-O2"),
            Unit(CSRC / "linear_amx_group.cpp", ("amx",)),
            Unit(CSRC / "linear_amx_int8.cpp", ("amx",)),
            Unit(
                CSRC / "linear_float8.cpp",
                ("portable", "avx2", "avx512", "avx512bf16", "amx"),  # those that multiply bf16
                "-O2",
                always=("avx512",),
            ),
            Unit(CSRC / "linear_decode.cpp", optimise="-O2"),
            Unit(CSRC / "linear_schedule.cpp", optimise="-O2"),
            Unit(CSRC / "adapters_schedule.cpp", optimise="-O2"),
            Unit(CSRC / "adapters_binding.cpp", optimise="-O1"),
            Unit(CSRC / "adapters_write.cpp"),
            Unit(CSRC / "experts_schedule.cpp", optimise="-O2"),
            Unit(CSRC / "states_schedule.cpp", optimise="-O2"),
            Unit(CSRC / "expert_sort.cpp", optimise="-O2"),
            Unit(CSRC / "route.cpp", optimise="-O2"),
            Unit(CSRC / "linear_embedding.cpp", optimise="-O2"),
            Unit(CSRC / "tape.cpp", optimise="-O2"),
            Unit(CSRC / "linear_isa.cpp", optimise="-O2"),
        ),
        headers=(*sorted(CSRC.glob("*.h")), *(SHARED_CSRC / name for name in shared)),
        include=(CSRC, SHARED_CSRC),
    )


def find_cached(cache_dir: Path) -> KernelLibrary | None:
    """See `native_build.find_cached`."""
    whole = native_build.find_cached(sources(), cache_dir)
    return whole or native_build.find_cached(sources().for_this_cpu(), cache_dir)


def build(cache_dir: Path, compiler: str | None = None, *, every_isa: bool = True) -> KernelLibrary:
    """See `native_build.build`. Not `every_isa`: only what this CPU takes. Raises BuildError."""
    make = native_build.build if every_isa else native_build.build_for_this_cpu
    return make(sources(), cache_dir, compiler)
