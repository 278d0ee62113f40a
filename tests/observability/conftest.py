from __future__ import annotations

import sys
from pathlib import Path

import pytest

sys.path.append(str(Path(__file__).parents[1] / "entrypoints"))


@pytest.fixture(scope="session")
def tiny_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    from scripted_server import save_model

    return save_model(tmp_path_factory.mktemp("observed") / "tiny")


@pytest.fixture(scope="session")
def busy_page(tiny_model: Path) -> str:
    from observed_server import page_after_some_requests

    return page_after_some_requests(tiny_model)
