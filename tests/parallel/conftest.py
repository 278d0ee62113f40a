"""The tiny models and the dense attention of the models' own tests, and the kernels' random blocks."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from rank_processes import Workers

sys.path += [
    str(Path(__file__).parents[1] / room)
    for room in ("models", "cpu_kernels", "end_to_end", "executor", "core", "adapters")
]
sys.path.append(str(Path(__file__).parents[2] / "tools"))


@pytest.fixture(scope="session")
def workers(native_cache: Path) -> Iterator[Workers]:
    made = Workers(native_cache)
    yield made
    made.end()
