"""The C++ kernels for tests, built once a session, and the torch path and the C++ kernels in turn for whole modules."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import sampling_oracle
import torch

from engine.sampling.kernels.native import Isa, NativeKernels


@pytest.fixture(scope="session")
def native(native_cache: Path) -> sampling_oracle.MakeNative:
    def make(vocab: int, isa: Isa = "auto") -> NativeKernels:
        supported = NativeKernels(1, native_cache, "portable").supported_isas
        if isa not in ("auto", *supported):
            pytest.skip(f"this CPU has no {isa}")
        return NativeKernels(vocab, native_cache, isa)

    return make


@pytest.fixture(scope="module", params=["torch", "native"])
def each_implementation(request: pytest.FixtureRequest) -> Iterator[None]:
    """Runs a module's tests with either as what `sampling_oracle.Table` samples with."""
    if request.param == "native":
        sampling_oracle.kernels_of = request.getfixturevalue("native")
    yield
    sampling_oracle.kernels_of = sampling_oracle.torch_path


@pytest.fixture
def threads() -> Iterator[Callable[[int], None]]:
    before = torch.get_num_threads()
    yield torch.set_num_threads
    torch.set_num_threads(before)
