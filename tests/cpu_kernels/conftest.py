from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from engine.cpu_kernels.linear import LinearOps, load


@pytest.fixture(scope="session")
def linear_ops(native_cache: Path) -> LinearOps:
    return load(native_cache, every_isa=True)


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    """Small cases on a busy machine only wait for a second thread; tests of threads set their own number."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)
