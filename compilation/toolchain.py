"""What Inductor needs once per machine before it can compile for a CPU, made ready while Dynamo traces.

Inductor tries one small library per vector instruction set and precompiles a 150 MB header: together most of a cold
start, on one core. Here both run on a thread of their own (it waits for g++) in a directory that outlives the process.
"""

from __future__ import annotations

import hashlib
import logging
import platform
import shutil
import threading
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path

import torch

from compilation.behind import THREAD_PREFIX, CompileStoppedError, check_stop
from compilation.directory import trusted_directory
from compilation.key import compiler_identity, cpu_identity
from compilation.store import locked, write_atomically

log = logging.getLogger(__name__)

_COMPLETE = "complete"
_PROBE = """#include <torch/csrc/inductor/cpp_prefix.h>
extern "C" void kernel(float* out) { out[0] = 0; }
"""


def toolchain_directory(root: Path) -> Path:
    """Below the cache directory, one per compiler, processor and torch build."""
    identity = f"{torch.__version__} {torch.version.git_version} {cpu_identity()} {compiler_identity()}"
    return trusted_directory(root / "toolchain") / hashlib.sha256(identity.encode()).hexdigest()[:16]


@contextmanager
def preparing(directory: Path, stop: threading.Event | None = None) -> Iterator[None]:
    """Prepare the toolchain beside the body, wait for it at the end. Inductor's directories must point into
    `directory`.

    A failure only costs time (Inductor does the same again, later), so it is logged, not raised. A directory that was
    left half-built, for instance by a killed compiler, is wiped: Inductor would take a broken library for a missing
    feature.
    """
    worker = threading.Thread(target=_prepare, args=(directory, stop), name="toolchain", daemon=True)
    worker.start()
    try:
        yield
    finally:
        worker.join()


def _prepare(directory: Path, stop: threading.Event | None) -> None:
    from torch._inductor.codecache import torch_key

    try:
        torch_key()  # hashes torch's sources once a process; artifacts are checked against it
        with locked(directory):
            if not (directory / _COMPLETE).exists():
                if directory.exists():
                    shutil.rmtree(directory)
                trusted_directory(directory)
            _probe_instruction_sets()  # never cut short: torch keeps the answer as long as the process lives
            threading.current_thread().name = f"{THREAD_PREFIX}toolchain"
            check_stop(stop)
            if not (directory / _COMPLETE).exists():
                _precompile_header()
                write_atomically(directory / _COMPLETE, "")
    except CompileStoppedError:
        log.debug("toolchain preparation was stopped")
    except Exception as error:
        log.warning("toolchain preparation failed, compilation will do without: %s", error)


def _probe_instruction_sets() -> None:
    """Let torch choose the vector instruction set; it keeps the answer for the life of the process.

    Left alone, torch builds and loads libraries for every candidate in turn, and then takes the best. The best one is
    tried here in the same way; once it has proved itself, the lesser sets of the same processor and compiler are
    believed.
    """
    from torch._inductor import config, cpu_vec_isa

    proven = False
    if platform.machine() in ("x86_64", "AMD64"):
        flags = set(cpu_vec_isa.x86_isa_checker())
        candidates = [isa for isa in cpu_vec_isa.supported_vec_isa_list if set(str(isa).split()) <= flags]
        proven = bool(candidates) and bool(candidates[0])
    with config.patch({"cpp.vec_isa_ok": True}) if proven else nullcontext():
        cpu_vec_isa.valid_vec_isa_list()
    cpu_vec_isa.pick_vec_isa()


def _precompile_header() -> None:
    """The header is a by-product of compiling any kernel, with exactly the flags that kernels get."""
    from torch._inductor.codecache import CppPythonBindingsCodeCache

    CppPythonBindingsCodeCache.load_pybinding(["float*"], _PROBE)
