"""How many answers of a dialect are read."""

from __future__ import annotations

import pytest


@pytest.fixture
def count(pytestconfig: pytest.Config) -> int:
    return 200 if pytestconfig.getoption("exhaustive") else 50
