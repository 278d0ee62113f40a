"""docs/security.md: its tests exist, and some of what it promises."""

from __future__ import annotations

import ast
import asyncio
import re
from pathlib import Path

import httpx
import pytest
from scripted_server import Server

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "security.md").read_text()
ROOMS = ("engine", "compilation", "attention_backends", "entrypoints")
REFUSED = {("pickle", "*"), ("marshal", "*"), ("shelve", "*"), ("dill", "*"), ("torch", "load"), ("numpy", "load")}
BY_NAME = {"eval", "exec"}
ALLOWED = {
    ("compilation/stitch.py", "exec"),  # of fixed templates and numbers: the file says so
}


def test_the_tests_that_it_names_exist() -> None:
    named = re.findall(r"`(tests/[\w/]+\.py)::(\w+)`", PAGE)
    assert len(named) > 25
    for path, name in named:
        assert re.search(rf"^(async )?def {name}\(", (ROOT / path).read_text(), re.MULTILINE), f"{path}::{name}"
    rows = [line for line in PAGE.splitlines() if line.startswith("| ") and "CVE-" in line]
    assert len(rows) == 9 and all("`tests/" in row for row in rows), "a class without a test"


def test_nothing_that_arrives_is_ever_code() -> None:
    """No module that makes objects of bytes is imported, and no text becomes a program."""
    found = set()
    files = [path for room in ROOMS for path in (ROOT / room).rglob("*.py")]
    assert len(files) > 400
    for path in files:
        name = str(path.relative_to(ROOT))
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Import):
                found |= {(name, alias.name) for alias in node.names if (alias.name.partition(".")[0], "*") in REFUSED}
            elif isinstance(node, ast.ImportFrom) and node.module is not None:
                top = node.module.partition(".")[0]
                imported = {alias.name for alias in node.names}
                found |= {(name, each) for each in imported if (top, "*") in REFUSED or (top, each) in REFUSED}
            elif isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id in BY_NAME:
                found.add((name, node.func.id))
            elif isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute):
                owner = node.func.value.id if isinstance(node.func.value, ast.Name) else ""
                if ({"np": "numpy"}.get(owner, owner), node.func.attr) in REFUSED or node.func.attr in (
                    "recv_pyobj",
                    "send_pyobj",
                ):
                    found.add((name, node.func.attr))
    assert found - ALLOWED == set()


@pytest.mark.parametrize("host", ["localhost", "127.0.0.1", "", "scripted/live", "scripted?/ready", "[::1]"])
def test_whatever_host_is_named_the_key_is_asked_for(tiny_server_model: Path, host: str) -> None:
    async def go() -> list[int]:
        async with Server(tiny_server_model, api_key="secret").client() as client:
            headers = [("Host", host), ("X-Forwarded-Host", "localhost"), ("X-Forwarded-For", "127.0.0.1")]
            asked: list[httpx.Response] = [
                await client.get("/v1/models", headers=headers),
                await client.post("/tokenize", json={"prompt": "x"}, headers=headers),
                await client.get("/metrics", headers=headers),
            ]
            return [reply.status_code for reply in asked]

    assert asyncio.run(asyncio.wait_for(go(), 60)) == [401] * 3
