from __future__ import annotations

from pathlib import Path

import pytest
from tiny_front import Front, save_model


@pytest.fixture(scope="session")
def tiny_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_model(tmp_path_factory.mktemp("tiny") / "tiny-llama")


@pytest.fixture(scope="session")
def front(tiny_model: Path) -> Front:
    return Front(tiny_model)
