"""What every build of kernels needs, whatever is compiled: a cache keyed by all that changes the result, a lock against
concurrent builds, compilers run in parallel, and errors that end with the compiler's own words.

Why not `torch.utils.cpp_extension`: one source becomes several translation units with different options, only one of
which needs torch's headers; the cache directory is the caller's; and a cold build stays within seconds. torch itself is
not imported: its place and version are known without, so that compilers run while it is.
"""

from __future__ import annotations

import fcntl
import hashlib
import importlib.util
import os
import shutil
import subprocess
import tempfile
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

CSRC = Path(__file__).parent / "csrc"
_TORCH = importlib.util.find_spec("torch")
TORCH_DIR = Path(_TORCH.origin).parent if _TORCH is not None and _TORCH.origin else Path("torch-is-missing")
TORCH_INCLUDE = ("-isystem", str(TORCH_DIR / "include"))
TORCH_LIBRARIES = (f"-L{TORCH_DIR / 'lib'}", "-ltorch", "-ltorch_cpu", "-lc10")

_CPUS = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
_COMPILERS = threading.BoundedSemaphore(_CPUS)
"""one for each compiler that runs: builds of several libraries share the CPUs"""


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


def hash_of(settings: object, sources: Iterable[Path]) -> str:
    """16 hex digits of `repr(settings)` and of the sources' names and contents."""
    digest = hashlib.sha256(repr(settings).encode())
    for path in sources:
        digest.update(path.name.encode() + b"\0" + path.read_bytes() + b"\0")
    return digest.hexdigest()[:16]


def version_hash(compiler: str) -> str:
    """8 hex digits of what the compiler says of itself. Raises BuildError if it does not run."""
    try:
        version = subprocess.run([compiler, "--version"], capture_output=True, timeout=60, check=True).stdout
    except (OSError, subprocess.SubprocessError) as error:
        raise BuildError(f"the compiler {compiler} does not run: {error}") from error
    return hashlib.sha256(version).hexdigest()[:8]


def build_once(target: Path, make: Callable[[Path], Path]) -> None:
    """Unless `target` exists: `make(scratch folder)` it, and move what that returns to `target` in one step.

    Processes that build the same target wait for the first one.
    """
    target.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    if target.exists():
        return
    with _locked(target.with_suffix(".lock")):
        if target.exists():
            return
        with tempfile.TemporaryDirectory(prefix=f"{target.stem}.", dir=target.parent) as scratch:
            made = make(Path(scratch))
            with made.open("rb") as whole:
                os.fsync(whole.fileno())  # a name without its content would outlive a loss of power
            made.replace(target)


@contextmanager
def _locked(path: Path) -> Iterator[None]:
    with path.open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield  # the file stays: removing it would let a waiter and a newcomer hold two different locks


def run_all(commands: Sequence[list[str]], timeout_s: float) -> None:
    """As many at a time as there are CPUs, also of several builds at once. Raises BuildError of the first (in order)
    that fails."""

    def in_turn(command: list[str]) -> None:
        with _COMPILERS:
            run(command, timeout_s)

    with ThreadPoolExecutor(_CPUS) as pool:
        list(pool.map(in_turn, commands))


def run(command: list[str], timeout_s: float) -> str:
    """What the command wrote to its standard error. Raises BuildError."""
    name = Path(command[0]).name
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=timeout_s)
    except OSError as error:
        raise BuildError(f"{name} does not run: {error}") from error
    except subprocess.TimeoutExpired as error:
        raise BuildError(f"{name} took more than {timeout_s:.0f} s: {' '.join(command)}") from error
    if done.returncode != 0:
        tail = "\n".join((done.stderr or done.stdout).splitlines()[-30:])
        raise BuildError(f"{name} failed ({done.returncode}): {' '.join(command)}\n{tail}")
    return done.stderr
