"""Compiles a library of CPU kernels with the system's C++ compiler: some units once, some once per instruction set.

Used by the paged attention here and by the engine's linear layers and sampling: each describes its sources as data
(`NativeSources`), and gets a library whose operators live in a namespace that names the build.
"""

from __future__ import annotations

import logging
import platform
import subprocess
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path

from attention_backends.toolchain import (
    BuildError,
    KernelLibrary,
    build_once,
    find_compiler,
    hash_of,
    run,
    run_all,
    version_hash,
)

logger = logging.getLogger(__name__)

COMPILE_TIMEOUT_S = 300

_LANGUAGE = ("-std=c++20", "-fPIC", "-fvisibility=hidden", "-w")
_COMMON = (*_LANGUAGE, "-fno-math-errno", "-fno-trapping-math", "-fno-strict-aliasing")
_AVX512 = ("-mavx512f", "-mavx512bw", "-mavx512vl", "-mavx512dq", "-mfma", "-mf16c")
_AVX512_BF16 = (*_AVX512, "-mavx512vnni", "-mavx512bf16")
# Not -march=native: the library may be cached on a shared disk and loaded by another CPU.
_X86_FLAGS: dict[str, tuple[str, ...]] = {
    "avx2": ("-mavx2", "-mfma", "-mf16c"),
    "avx512": _AVX512,
    "avx512vnni": (*_AVX512, "-mavx512vnni"),
    "avx512bf16": _AVX512_BF16,
    "amx": (*_AVX512_BF16, "-mamx-tile", "-mamx-bf16", "-mamx-int8"),
}
_CPU_AVX512 = ("avx512f", "avx512bw", "avx512vl", "avx512dq", "fma", "f16c")
_CPU_FLAGS: dict[str, tuple[str, ...]] = {
    "avx2": ("avx2", "fma", "f16c"),
    "avx512": _CPU_AVX512,
    "avx512vnni": (*_CPU_AVX512, "avx512_vnni"),
    "avx512bf16": (*_CPU_AVX512, "avx512_vnni", "avx512_bf16"),
    "amx": (*_CPU_AVX512, "avx512_vnni", "avx512_bf16", "amx_tile", "amx_bf16", "amx_int8"),
}
"""as /proc/cpuinfo names them"""
ISAS = ("portable", *_X86_FLAGS)
"""narrowest first; every CPU with avx512bf16 has avx512vnni, every one with amx has both"""
PREBUILT = Path(__file__).parent / "prebuilt"
"""libraries that were built when the package was"""
_SPARE = "-O1"
_LINK = ("-shared", "-Wl,--no-as-needed")


@dataclass(frozen=True)
class Unit:
    """One source file. `isas` None: compiled once; else once for each of them, with `-DPAGELOOM_ISA=<isa>` and
    `-DPAGELOOM_KERNELS=kernels_<isa>`. Units compiled once see `-DPAGELOOM_HAVE_<ISA>` for every variant built."""

    source: Path
    isas: tuple[str, ...] | None = None
    optimise: str = "-O3"
    always: tuple[str, ...] = ()
    """of `isas`: taken for some shapes also by a CPU that has wider ones"""
    spare: tuple[str, ...] = ()
    """of `isas`: built quickly, not well, because the CPU at hand never takes them"""

    def for_cpu(self, has: frozenset[str]) -> Unit:
        """Only what a CPU that `has` these ISAs takes: AMX, the widest of the others, and portable as a spare."""
        if self.isas is None:
            return self
        vectors = [isa for isa in self.isas if isa in has and isa not in ("portable", "amx")]
        taken = {*vectors[-1:], *(isa for isa in self.always if isa in has), *({"amx"} & has)}
        kept = tuple(isa for isa in self.isas if isa in taken or isa == "portable")
        return replace(self, isas=kept, spare=("portable",) if vectors else ())


@dataclass(frozen=True)
class NativeSources:
    """`folder`: below the cache directory. `prefix`: of the operators' namespace, which is the macro PAGELOOM_OPS.
    `headers`: all that units include, because a change must build anew."""

    folder: str
    prefix: str
    units: tuple[Unit, ...]
    headers: tuple[Path, ...]
    include: tuple[Path, ...] = ()

    def for_this_cpu(self) -> NativeSources:
        """What this machine's CPU takes, so that a cold build is short. The library serves other CPUs too, slowly."""
        has = cpu_isas()
        return self if has is None else replace(self, units=tuple(unit.for_cpu(has) for unit in self.units))


@cache
def cpu_isas() -> frozenset[str] | None:
    """Which of `ISAS` this machine's CPU has; None where the kernel does not tell."""
    try:
        text = Path("/proc/cpuinfo").read_text()
    except OSError:
        return None
    flags = next((set(line.partition(":")[2].split()) for line in text.splitlines() if line.startswith("flags")), None)
    if flags is None or not _on_x86():
        return None
    return frozenset({"portable", *(isa for isa, needed in _CPU_FLAGS.items() if flags.issuperset(needed))})


def find_cached(sources: NativeSources, cache_dir: Path) -> KernelLibrary | None:
    """A library built from exactly these sources, by whatever compiler: one that came with the package, or one in the
    cache. Needs no compiler itself."""
    for folder in (PREBUILT, cache_dir):
        found = sorted((folder / sources.folder).glob(f"{_source_key(sources)}_*.so"))
        if found:
            return _library(sources, found[0])
    return None


def build(sources: NativeSources, cache_dir: Path, compiler: str | None = None) -> KernelLibrary:
    """The library that came with the package, from the cache, or compiled now (seconds). Safe against concurrent builds
    in other processes.

    Raises BuildError: no compiler and nothing built, or the compiler failed.
    """
    if (built := find_cached(sources, PREBUILT)) is not None:
        return built
    compiler = compiler or find_compiler()
    if compiler is None:
        if (built := find_cached(sources, cache_dir)) is not None:
            return built
        raise BuildError(f"no C++ compiler (g++, c++, clang++) on PATH, and no built library under {cache_dir}")
    target = cache_dir / sources.folder / f"{_source_key(sources)}_{version_hash(compiler)}.so"
    build_once(target, lambda scratch: _compile(sources, compiler, _library(sources, target).namespace, scratch))
    return _library(sources, target)


def build_for_this_cpu(sources: NativeSources, cache_dir: Path, compiler: str | None = None) -> KernelLibrary:
    """As `build`, but only what this machine's CPU takes; a library with every ISA, if there is one, serves as well."""
    return find_cached(sources, cache_dir) or build(sources.for_this_cpu(), cache_dir, compiler)


def prebuild(sources: NativeSources) -> KernelLibrary:
    """Build the library, for every CPU, to be part of the package; takes the place of one of older sources. Raises
    BuildError."""
    folder = PREBUILT / sources.folder
    folder.mkdir(parents=True, exist_ok=True)
    folder.chmod(0o755)  # for every user of this installation, whoever built it
    library = build(sources, PREBUILT)
    for other in library.path.parent.glob("*"):
        if other != library.path:
            other.unlink()
    return library


def _library(sources: NativeSources, path: Path) -> KernelLibrary:
    return KernelLibrary(path, f"{sources.prefix}_{path.stem}")


def _source_key(sources: NativeSources) -> str:
    shape = [(unit.source.name, unit.isas, unit.spare, unit.optimise) for unit in sources.units]
    settings = (_COMMON, _X86_FLAGS, _LINK, shape, platform.machine())
    files = dict.fromkeys((*(unit.source for unit in sources.units), *sources.headers))
    return hash_of(settings, sorted(files, key=lambda path: path.name))


def _compile(sources: NativeSources, compiler: str, namespace: str, scratch: Path) -> Path:
    logger.info("compiling %s with %s, once on this machine", sources.folder, compiler)
    with ThreadPoolExecutor() as pool:
        known = pool.map(lambda flags: _accepts(compiler, flags), _isa_flags().values())
        flags_of = {isa: flags for (isa, flags), accepted in zip(_isa_flags().items(), known) if accepted}
    wanted = {isa for unit in sources.units for isa in unit.isas or ()}
    flags_of = {isa: flags for isa, flags in flags_of.items() if isa in wanted}
    have = [f"-DPAGELOOM_HAVE_{isa.upper()}" for isa in flags_of]
    include = [f"-I{path}" for path in sources.include]
    commands, objects = [], []
    for unit in sources.units:
        for isa in (None,) if unit.isas is None else [isa for isa in reversed(unit.isas) if isa in flags_of]:
            flags = [_SPARE if isa in unit.spare else unit.optimise, *include, f"-DPAGELOOM_OPS={namespace}"]
            flags += (
                have if isa is None else [*flags_of[isa], f"-DPAGELOOM_ISA={isa}", f"-DPAGELOOM_KERNELS=kernels_{isa}"]
            )
            objects.append(str(scratch / f"{unit.source.stem}_{isa or 'once'}.o"))
            commands.append([compiler, *_COMMON, *flags, "-c", str(unit.source), "-o", objects[-1]])
    run_all(commands, COMPILE_TIMEOUT_S)
    built = scratch / "library.so"
    run([compiler, *objects, "-o", str(built), *_LINK, *_name_of_torch(compiler, scratch)], COMPILE_TIMEOUT_S)
    return built


def _name_of_torch(compiler: str, scratch: Path) -> list[str]:
    """Options that make a library need libtorch_cpu.so, by a stand-in of that name: the process that loads it has
    torch, and where it is built there may be none."""
    stand_in = scratch / "libtorch_cpu.so"
    run([compiler, "-shared", "-Wl,-soname,libtorch_cpu.so", "-x", "c++", "/dev/null", "-o", str(stand_in)], 60)
    return [f"-L{scratch}", "-ltorch_cpu"]


def _isa_flags() -> dict[str, Sequence[str]]:
    return {"portable": (), **(_X86_FLAGS if _on_x86() else {})}


def _on_x86() -> bool:
    return platform.machine() in ("x86_64", "AMD64")


def _accepts(compiler: str, flags: Sequence[str]) -> bool:
    """Whether the compiler knows these options; an older one is no error, the variant is left out."""
    command = [compiler, *flags, "-x", "c++", "-fsyntax-only", "/dev/null"]
    return subprocess.run(command, capture_output=True, timeout=60).returncode == 0
