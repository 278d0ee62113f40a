from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch

from attention_backends.build import build
from attention_backends.cpu import CpuBackend, Isa


@pytest.fixture(scope="session")
def kernel_cache(native_cache: Path) -> Path:
    build(native_cache)  # of every ISA; by itself "auto" builds only what this CPU takes
    return native_cache


@pytest.fixture(scope="session")
def cpu_backend(kernel_cache: Path) -> Callable[[Isa], CpuBackend]:
    backends: dict[Isa, CpuBackend] = {}

    def prepared(isa: Isa = "auto") -> CpuBackend:
        if isa not in backends:
            supported = CpuBackend() if isa == "auto" else prepared("auto")
            if isa != "auto" and isa not in supported.supported_isas:
                pytest.skip(f"this CPU has no {isa}")
            backends[isa] = CpuBackend(isa)
            backends[isa].prepare(kernel_cache)
        return backends[isa]

    return prepared


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    """Small cases on a busy machine only wait for a second thread; tests of threads set their own number."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)
