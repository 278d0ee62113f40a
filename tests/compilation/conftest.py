from __future__ import annotations

from pathlib import Path

import pytest


@pytest.fixture(scope="session")
def cache_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """One cache for all tests of the room: the toolchain is prepared once, and equal pieces compile once."""
    return tmp_path_factory.mktemp("compile_cache")
