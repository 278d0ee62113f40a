from __future__ import annotations

from pathlib import Path

import pytest
from scripted_server import Server, save_model


@pytest.fixture(scope="session")
def tiny_server_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_model(tmp_path_factory.mktemp("served") / "tiny")


@pytest.fixture
def server(tiny_server_model: Path) -> Server:
    return Server(tiny_server_model)
