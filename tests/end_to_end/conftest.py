"""A browser, and the server whose page it visits."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

import pytest
from page_browser import CHROMIUM, FLAGS, Visit, page_server, visit

if TYPE_CHECKING:
    from playwright.sync_api import Browser


@pytest.fixture
def browser() -> Iterator[Browser]:
    """Skips where there is none. One for each test: while it is there, an event loop runs in this thread, and tests
    that start their own may come in between."""
    playwright = pytest.importorskip("playwright.sync_api")
    if CHROMIUM is None:
        pytest.skip("there is no chromium")
    with playwright.sync_playwright() as running:
        chromium = running.chromium.launch(executable_path=CHROMIUM, args=FLAGS)
        yield chromium
        chromium.close()


@pytest.fixture(scope="session")
def page_base(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    if CHROMIUM is None:
        pytest.skip("there is no chromium")
    with page_server(tmp_path_factory.mktemp("page")) as url:
        yield url


@pytest.fixture
def page(browser: Browser, page_base: str) -> Iterator[Visit]:
    with visit(browser, page_base) as visited:
        visited.open()
        yield visited
