"""The page's routes: what is sent, under which policy, to whom; and `/v1/board`."""

from __future__ import annotations

import asyncio
import gzip
import hashlib
import re
from collections.abc import Awaitable, Callable
from itertools import pairwise
from pathlib import Path
from typing import Any
from urllib.parse import unquote

import httpx
import jsonschema
import pytest
from scripted_server import Server

from engine.config import CacheConfig
from engine.core.wire import CoreReady
from engine.observability.metrics import EngineMetrics
from engine.observability.timings import RequestTimings
from engine.request import RequestMetrics
from entrypoints.server.page.routes import FILES, HEADERS, page_files

VENDOR = FILES / "vendor"
OURS = [file for file in FILES.iterdir() if file.suffix in (".js", ".css", ".html", ".svg")]
MOST_BYTES = 200_000


def with_client(server: Server, scenario: Callable[[httpx.AsyncClient], Awaitable[None]]) -> None:
    async def go() -> None:
        async with server.client() as client:
            await scenario(client)

    asyncio.run(asyncio.wait_for(go(), 60))


async def status_of(client: httpx.AsyncClient, target: str) -> int:
    """Of a GET whose target no client has tidied up, as uvicorn gives it to the application."""
    raw, _, query = target.partition("?")
    statuses: list[int] = []

    async def receive() -> dict[str, Any]:
        return {"type": "http.request", "body": b""}

    async def send(message: dict[str, Any]) -> None:
        if message["type"] == "http.response.start":
            statuses.append(message["status"])

    scope = {"type": "http", "http_version": "1.1", "method": "GET", "scheme": "http", "path": unquote(raw)}
    scope |= {"raw_path": raw.encode(), "query_string": query.encode(), "root_path": "", "headers": []}
    app: Any = client._transport.app  # type: ignore[attr-defined]
    await app(scope, receive, send)
    return statuses[0]


def test_every_file_is_sent_with_its_type_and_policy(server: Server) -> None:
    async def scenario(client: httpx.AsyncClient) -> None:
        files = page_files()
        assert {"/", "/page/main.js", "/page/base.css", "/page/icon.svg", "/page/vendor/preact.mjs"} <= files.keys()
        for path in files:
            reply = await client.get(path)
            assert reply.status_code == 200, path
            name = "index.html" if path == "/" else path.removeprefix("/page/")
            assert reply.content == (FILES / name).read_bytes()
            kind = {"html": "text/html", "css": "text/css", "svg": "image/svg+xml"}.get(name.rsplit(".", 1)[-1])
            assert reply.headers["content-type"].split(";")[0] == (kind or "text/javascript")
            for header, value in HEADERS.items():
                assert reply.headers[header] == value, (path, header)

    with_client(server, scenario)


def test_the_policy_allows_this_server_and_nothing_else() -> None:
    policy = dict(part.split(" ", 1) for part in HEADERS["Content-Security-Policy"].split("; "))
    assert policy == {
        "default-src": "'none'",
        "script-src": "'self'",
        "style-src": "'self'",
        "connect-src": "'self'",
        "img-src": "'self' data:",
        "base-uri": "'none'",
        "form-action": "'none'",
        "frame-ancestors": "'none'",
        "require-trusted-types-for": "'script'",
        "trusted-types": "'none'",
    }


@pytest.mark.parametrize("encoding", ["gzip", "identity"])
def test_what_a_browser_has_is_not_sent_again(server: Server, encoding: str) -> None:
    async def scenario(client: httpx.AsyncClient) -> None:
        asks = {"accept-encoding": encoding}
        first = await client.get("/page/main.js", headers=asks)
        assert first.headers.get("content-encoding") == ("gzip" if encoding == "gzip" else None)
        for known in (first.headers["etag"], f'"other", W/{first.headers["etag"]}'):
            again = await client.get("/page/main.js", headers={**asks, "if-none-match": known})
            assert (again.status_code, again.content) == (304, b"")
            assert again.headers["etag"] == first.headers["etag"]
        assert (await client.get("/page/main.js", headers={**asks, "if-none-match": '"other"'})).status_code == 200

    with_client(server, scenario)


def test_the_page_needs_no_key_and_nothing_beside_it_is_open(tiny_server_model: Path) -> None:
    async def scenario(client: httpx.AsyncClient) -> None:
        for path in page_files():
            assert (await client.get(path)).status_code == 200, path
            assert (await client.head(path)).status_code == 200, path
            assert (await client.post(path)).status_code in (405, 404), path
        assert (await client.get("/v1/board")).status_code == 401
        assert (await client.get("/v1/board", headers={"Authorization": "Bearer secret"})).status_code == 200
        tricks = [
            "/page",
            "/page/",
            "//",
            "/page/index.html",
            "/page/vendor/README.md",
            "/page/vendor/LICENSE.preact",
            "/page/routes.py",
            "/page/../v1/models",
            "/page/%2e%2e/v1/models",
            "/page/..%2fv1/models",
            "/page/vendor/../../v1/models",
            "/page/main.js/",
            "/page//main.js",
            "//page/main.js",
            "/page/main.js%00",
            "/page/main.js;/v1/models",
            "/PAGE/main.js",
            "/page/%252e%252e/%252e%252e/v1/models",
            "/v1/models/../../page/main.js",
            "/page/main.js%2f..%2f..%2fv1%2fmodels",
            "/page\\main.js",
        ]
        for trick in tricks:
            assert await status_of(client, trick) == 401, trick
        assert await status_of(client, "/page/main.js?v=1") == 200

    with_client(Server(tiny_server_model, api_key="secret"), scenario)


def test_what_others_wrote_is_what_they_published() -> None:
    readme = (VENDOR / "README.md").read_text()
    listed = dict(re.findall(r"^\| `([^`]+)` \|.*\| `([0-9a-f]{64})` \|$", readme, re.MULTILINE))
    there = {f.name: hashlib.sha256(f.read_bytes()).hexdigest() for f in VENDOR.iterdir() if f.name != "README.md"}
    assert listed == there
    for name in there:
        if not name.startswith("LICENSE."):
            licences = re.findall(rf"^\| `{re.escape(name)}` .*`(LICENSE\.\w+)`", readme, re.MULTILINE)
            assert len(licences) == 1 and licences[0] in there, f"{name} has no licence beside it"


def test_the_page_is_small() -> None:
    files = [file for file in FILES.rglob("*") if file.is_file()]
    assert sum(len(gzip.compress(file.read_bytes(), mtime=0)) for file in files) <= MOST_BYTES
    assert sum(len(file.zipped) for file in page_files().values()) <= MOST_BYTES


def test_our_files_name_no_other_host_and_write_no_html() -> None:
    assert len(OURS) > 15
    for file in OURS:
        text = file.read_text().replace('xmlns="http://www.w3.org/2000/svg"', "")
        assert not re.search(r"https?://|[\"'(]//\w", text), file.name
        for sink in (
            "innerHTML",
            "outerHTML",
            "insertAdjacentHTML",
            "document.write",
            "eval(",
            "new Function",
            "srcdoc",
        ):
            assert sink not in text, (file.name, sink)


def test_modules_import_only_what_is_sent() -> None:
    paths = page_files()
    for file in OURS:
        for target in re.findall(r'from "([^"]+)"|import\("([^"]+)"\)', file.read_text()):
            name = "".join(target)
            assert name.startswith("./") and f"/page/{name[2:]}" in paths, (file.name, name)
    for target in re.findall(r'(?:src|href)="([^"]+)"', (FILES / "index.html").read_text()):
        assert f"/{target}" in paths, target


def test_a_look_at_the_board_is_what_its_description_says(server: Server) -> None:
    async def scenario(client: httpx.AsyncClient) -> None:
        for tokens in (3, 3, 5):
            await client.post("/v1/completions", json={"prompt": "x", "max_tokens": tokens})
        first, second = [(await client.get("/v1/board")).json() for _ in range(2)]
        document = (await client.get("/openapi.json")).json()
        answer = document["paths"]["/v1/board"]["get"]["responses"]["200"]
        schema = answer["content"]["application/json"]["schema"]
        jsonschema.Draft202012Validator({**schema, "components": document["components"]}).validate(first)
        assert second["at_s"] > first["at_s"]
        assert first["engine"]["model"] == "tiny" and first["engine"]["num_blocks"] == 64
        assert first["engine"]["attention_backend"] == "scripted"
        assert first["ended"] == {"stop": 0, "length": 3, "abort": 0, "error": 0, "refused": 0}
        for name in ("first_token_s", "per_token_s", "latency_s"):
            assert sum(first[name]["counts"]) == 3
            assert len(first[name]["counts"]) == len(first[name]["bounds"]) + 1
        server.core.die()
        await asyncio.sleep(0.05)
        dead = await client.get("/v1/board")
        assert dead.status_code == 500 and dead.json()["error"]["code"] == "engine_dead"

    with_client(server, scenario)


def test_a_distribution_counts_each_value_in_its_bucket() -> None:
    ready = CoreReady(
        num_blocks=1,
        block_size=16,
        max_model_len=64,
        attention_backend="cpu",
        ledger="",
        distinct_pieces=0,
        pieces_compiled=0,
        startup_seconds=0,
    )
    cache = CacheConfig(
        block_size=16, dtype="float32", kv_cache_memory=None, memory_fraction=0.5, enable_prefix_caching=True
    )
    metrics, times = EngineMetrics("m", cache, ready), [0.0004, 0.004, 0.1, 0.3, 7.0, 500.0]
    for first in times:
        metrics.observe_request(
            RequestTimings(
                times=RequestMetrics(arrival_time=10.0, first_token_time=10.0 + first),
                finished_time=600.0,
                prompt_tokens=1,
                cached_tokens=0,
                sample_tokens=[1],
                n=1,
                max_tokens=1,
                finish_reasons=["stop"],
            )
        )
    found = metrics.distribution("time_to_first_token_seconds")
    edges = [float("-inf"), *found.bounds, float("inf")]
    assert found.counts == [sum(low < t <= high for t in times) for low, high in pairwise(edges)]
    assert found.sum == pytest.approx(sum(times)) and metrics.ended()["stop"] == len(times)
