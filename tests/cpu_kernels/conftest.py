from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from attention_backends.toolchain import find_compiler
from engine.cpu_kernels.linear import LinearOps, load


@pytest.fixture(scope="session")
def linear_ops(tmp_path_factory: pytest.TempPathFactory) -> LinearOps:
    if find_compiler() is None:
        pytest.skip("no C++ compiler")
    return load(tmp_path_factory.mktemp("linear"), every_isa=True)


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    """Small cases on a busy machine only wait for a second thread; tests of threads set their own number."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)
