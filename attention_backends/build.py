"""Compiles `csrc/` with the system's C++ compiler and caches the library by everything that changes it.

Why not `torch.utils.cpp_extension`: one source becomes several translation units with different ISA flags, only
one of which needs torch's headers; the cache directory is the caller's; and a cold build stays within seconds.
"""

from __future__ import annotations

import fcntl
import hashlib
import os
import platform
import shutil
import subprocess
import tempfile
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import torch

CSRC = Path(__file__).parent / "csrc"
COMPILE_TIMEOUT_S = 300

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
_LINK = ("-shared", "-Wl,--no-as-needed", "-ltorch", "-ltorch_cpu", "-lc10")


class BuildError(RuntimeError):
    """The kernels could not be compiled; the message ends with the compiler's own output."""


@dataclass(frozen=True)
class KernelLibrary:
    path: Path
    namespace: str
    """its ops are `torch.ops.<namespace>.<op>`; it names the build, so that different builds fit in one process"""


def default_cache_dir() -> Path:
    return Path.home() / ".cache" / "pageloom"


def find_compiler() -> str | None:
    """Absolute path of the system's C++ compiler, or None."""
    return next((found for name in ("g++", "c++", "clang++") if (found := shutil.which(name))), None)


def find_cached(cache_dir: Path) -> KernelLibrary | None:
    """A library built from exactly these sources for this torch, by whatever compiler; needs no compiler itself."""
    found = sorted((cache_dir / "attention-cpu").glob(f"{_source_key()}_*.so"))
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
    folder = cache_dir / "attention-cpu"
    folder.mkdir(parents=True, exist_ok=True)
    target = folder / f"{_source_key()}_{_compiler_key(compiler)}.so"
    if not target.exists():
        with _locked(target.with_suffix(".lock")):
            if not target.exists():
                _compile(compiler, folder, target)
    return _library(target)


def _library(path: Path) -> KernelLibrary:
    return KernelLibrary(path, f"pageloom_cpu_{path.stem}")


def _source_key() -> str:
    digest = hashlib.sha256(repr((_COMMON, _X86_VARIANTS, _LINK, torch.__version__, platform.machine())).encode())
    for path in (*sorted(CSRC.glob("*.cpp")), *sorted(CSRC.glob("*.h"))):
        digest.update(path.name.encode() + b"\0" + path.read_bytes() + b"\0")
    return digest.hexdigest()[:16]


def _compiler_key(compiler: str) -> str:
    try:
        version = subprocess.run([compiler, "--version"], capture_output=True, timeout=60, check=True).stdout
    except (OSError, subprocess.SubprocessError) as error:
        raise BuildError(f"the C++ compiler {compiler} does not run: {error}") from error
    return hashlib.sha256(version).hexdigest()[:8]


@contextmanager
def _locked(path: Path) -> Iterator[None]:
    with path.open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield  # the file stays: removing it would let a waiter and a newcomer hold two different locks


def _compile(compiler: str, folder: Path, target: Path) -> None:
    torch_dir = Path(torch.__file__).parent
    with tempfile.TemporaryDirectory(prefix=f"{target.stem}.", dir=folder) as scratch_name:
        scratch = Path(scratch_name)
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
        include = ["-isystem", str(torch_dir / "include")]
        units.append(("binding", "binding.cpp", ("-O2", f"-DPAGELOOM_OPS=pageloom_cpu_{target.stem}", *have, *include)))
        units.append(("schedule", "schedule.cpp", ("-O3",)))

        def compile_unit(unit: tuple[str, str, Sequence[str]]) -> str:
            name, source, flags = unit
            output = str(scratch / f"{name}.o")
            _run([compiler, *_COMMON, *flags, "-c", str(CSRC / source), "-o", output])
            return output

        with ThreadPoolExecutor(len(os.sched_getaffinity(0))) as pool:
            objects = list(pool.map(compile_unit, units))
        built = scratch / "library.so"
        _run([compiler, *objects, "-o", str(built), f"-L{torch_dir / 'lib'}", *_LINK])
        built.replace(target)


def _variants() -> dict[str, tuple[str, ...]]:
    """Widest first: those take longest to compile."""
    on_x86 = platform.machine() in ("x86_64", "AMD64")
    return {**(dict(reversed(_X86_VARIANTS.items())) if on_x86 else {}), "portable": ()}


def _accepts(compiler: str, flags: Sequence[str]) -> bool:
    """Whether the compiler knows these options; an older one is no error, the variant is left out."""
    command = [compiler, *flags, "-x", "c++", "-fsyntax-only", "/dev/null"]
    return subprocess.run(command, capture_output=True, timeout=60).returncode == 0


def _run(command: list[str]) -> None:
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=COMPILE_TIMEOUT_S)
    except subprocess.TimeoutExpired as error:
        raise BuildError(f"the C++ compiler took more than {COMPILE_TIMEOUT_S} s: {' '.join(command)}") from error
    if done.returncode != 0:
        tail = "\n".join((done.stderr or done.stdout).splitlines()[-30:])
        raise BuildError(f"the C++ compiler failed ({done.returncode}): {' '.join(command)}\n{tail}")
