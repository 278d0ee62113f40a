"""A router in a thread, in front of servers without a model."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from served import Served


@pytest.fixture
def served() -> Iterator[Served]:
    made = Served()
    yield made
    made.close()
