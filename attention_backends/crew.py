"""The threads that help a computing one on CPUs (`csrc/crew.cpp`), lent to every library of kernels that is loaded."""

from __future__ import annotations

import threading
from pathlib import Path
from typing import Any

import torch

from attention_backends.crew_sources import sources
from attention_backends.native_build import build
from attention_backends.toolchain import KernelLibrary

_loading = threading.Lock()


def load_library(library: KernelLibrary, cache_dir: Path) -> tuple[Any, bool]:
    """The library's operators, with the process's crew to run them, and whether they have been loaded only now.
    Raises BuildError."""
    with _loading:
        address = _crew(cache_dir).crew()
        ops, new = _load(library, "lend_crew")
        if new:
            ops.lend_crew(address)
    return ops, new


def helpers_of_this_thread(count: int, cache_dir: Path) -> list[int]:
    """The system's numbers of the first `count` threads that help the calling one; fewer where it gives no more.
    Raises BuildError."""
    numbers: list[int] = _crew(cache_dir).helpers(count)
    return numbers


def _crew(cache_dir: Path) -> Any:
    return _load(build(sources(), cache_dir), "crew")[0]


def _load(library: KernelLibrary, operator: str) -> tuple[Any, bool]:
    ops = getattr(torch.ops, library.namespace)
    new = not hasattr(ops, operator)
    if new:
        torch.ops.load_library(str(library.path))  # type: ignore[no-untyped-call]  # torch leaves it untyped
    return ops, new
