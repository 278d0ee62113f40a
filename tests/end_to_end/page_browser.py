"""A browser on the page of a real server with a tiny random model; what must hold of every page is looked at here."""

from __future__ import annotations

import contextlib
import json
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from serving import serving
from tiny_families import save_tiny

if TYPE_CHECKING:
    from playwright.sync_api import Browser, Page

KEY = "key-of-the-page"
CHROMIUM = shutil.which("chromium")
FLAGS = [
    "--headless",
    "--no-sandbox",
    "--disable-gpu",
    "--disable-quic",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
]
TEMPLATE = (
    "{% if tools %}{{ tools | tojson }}{% endif %}"
    "{% for m in messages %}<|{{ m.role }}|>{{ m.content }}{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)


@contextlib.contextmanager
def page_server(directory: Path) -> Iterator[str]:
    """The base URL; who asks needs `KEY`."""
    model = directory / "tiny"
    save_tiny("Llama", model, vocab_size=259, max_position_embeddings=16384)
    (model / "chat_template.jinja").write_text(TEMPLATE)
    key = directory / "key"
    key.write_text(KEY)
    options = ["--served-model-name", "tiny", "--api-key-file", str(key), "--compile", "none", "--dtype", "float32"]
    options += ["--override-generation-config", '{"temperature": 0, "max_new_tokens": 24}']
    options += ["--tool-call-parser", "hermes"]
    with serving(str(model), *options, "--kv-cache-memory", "16MiB") as base:
        yield base


class Visit:
    """A page and what it did: nothing leaves the server, no script fails, and the policy is never broken."""

    def __init__(self, page: Page, base: str) -> None:
        self.page, self.base = page, base
        self.requests: list[str] = []
        self.complaints: list[str] = []
        page.on("request", lambda request: self.requests.append(request.url))
        page.on("pageerror", lambda error: self.complaints.append(str(error)))
        page.on("console", lambda message: self.complaints.append(message.text) if message.type == "error" else None)
        page.on("dialog", lambda dialog: dialog.accept())

    def check(self) -> None:
        own = (self.base, "data:", f"blob:{self.base}")
        assert self.requests and [url for url in self.requests if not url.startswith(own)] == []
        refused = "Failed to load resource: the server responded with a status of"  # Chromium's line for any 4xx
        assert [text for text in self.complaints if not text.startswith(refused)] == []

    def open(self, view: str = "chat") -> None:
        self.page.goto(f"{self.base}/#{view}")
        self.page.wait_for_selector(".page")

    def say(self, text: str) -> None:
        self.page.get_by_label("Message", exact=True).fill(text)
        self.page.keyboard.press("Enter")

    def answered(self, answers: int = 1) -> None:
        """Until as many answers as that are complete."""
        self.wait_for(".assistant[aria-busy=false]", answers)
        self.wait_for("[aria-label=Send]", 1)

    def wait_for(self, selector: str, count: int) -> None:
        """Until as many elements are there. (`wait_for_function` would evaluate text, which the policy forbids.)"""
        from playwright.sync_api import expect

        expect(self.page.locator(selector)).to_have_count(count, timeout=30_000)

    def kept(self) -> list[dict[str, Any]]:
        """The messages of the latest conversation, as the browser keeps them."""
        found = self.page.evaluate(
            "Object.keys(localStorage).filter(k => k.startsWith('pageloom.conversation.')).map(k => localStorage[k])"
        )
        latest = max((json.loads(text) for text in found), key=lambda conversation: conversation["updated"])
        return list(latest["messages"])

    def set(self, label: str, value: str) -> None:
        """A setting of the open conversation."""
        if not self.page.locator(".settings").is_visible():
            self.page.get_by_role("button", name="Settings", exact=True).click()
        field = self.page.locator(".settings").get_by_label(label, exact=True)
        if field.evaluate("field => field.tagName") == "SELECT":
            field.select_option(value)
        else:
            field.fill(value)

    def too_wide(self) -> list[str]:
        """Elements that scroll sideways and should not, by class."""
        return list(
            self.page.evaluate(
                "[document.documentElement,"
                " ...document.querySelectorAll('.scroll, .board, .settings-body, .conversations')]"
                ".filter(e => e.scrollWidth > e.clientWidth).map(e => e.className || e.tagName)"
            )
        )


@contextlib.contextmanager
def visit(browser: Browser, base: str, *, width: int = 1400, key: str | None = KEY, **options: Any) -> Iterator[Visit]:
    context = browser.new_context(viewport={"width": width, "height": 844}, **options)
    context.grant_permissions(["clipboard-read", "clipboard-write"], origin=base)
    if key is not None:
        context.add_init_script(f"localStorage.setItem('pageloom.key', {json.dumps(key)})")
    visited = Visit(context.new_page(), base)
    try:
        yield visited
        visited.check()
    finally:
        context.close()


def as_stream(*deltas: dict[str, Any], finish: str = "stop") -> str:
    """Server-sent events of an answer that consists of `deltas`."""
    chunks: list[dict[str, Any]] = [{"choices": [{"index": 0, "delta": delta}]} for delta in deltas]
    chunks.append({"choices": [{"index": 0, "delta": {}, "finish_reason": finish}]})
    return "".join(f"data: {json.dumps(chunk)}\n\n" for chunk in chunks) + "data: [DONE]\n\n"
