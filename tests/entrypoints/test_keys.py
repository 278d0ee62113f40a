"""`--keys`: who is let in, for what, how often; what it is called by clients, and what nobody else finds."""

from __future__ import annotations

import asyncio
import hashlib
import json
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest
from hypothesis import given
from hypothesis import strategies as st
from scripted_server import Server
from test_http_errors import CHAT, error_of

from entrypoints.server.counts import OwnCounts
from entrypoints.server.keys import Keyring
from entrypoints.server.load import COUNTED
from entrypoints.server.page.routes import page_files
from entrypoints.server.quotas import Quotas, RateLimitedError
from entrypoints.server.scopes import scope_of

ROUTES = {
    "metrics": {"/metrics", "/load", "/server_info", "/v1/board"},
    "admin": {
        "/reset_prefix_cache",
        "/scale_elastic_ep",
        "/is_scaling_elastic_ep",
        "/v1/load_lora_adapter",
        "/v1/unload_lora_adapter",
        "/v1/prefixes",
        "/v1/prefixes/{name:path}",
    },
    None: {"/version", "/docs", "/openapi.json"},
}
"""all others are for inference; whoever adds a route says here if it is not"""
INFER = (
    "/v1/",
    "/api",
    "/tokenize",
    "/detokenize",
    "/infill",
    "/score",
    "/rerank",
    "/v2/rerank",
    "/classify",
    "/pooling",
)
OPEN = {"/live", "/ready", "/health", "/ping"}


def entry(name: str, **fields: Any) -> str:
    """Of a key that is `name`'s reversed."""
    digest = hashlib.sha256(name[::-1].encode()).hexdigest()
    lines = [f"{key} = {json.dumps(value)}" for key, value in {"name": name, "sha256": digest, **fields}.items()]
    return "\n".join(["[[keys]]", *lines, ""])


def bearer(name: str) -> dict[str, str]:
    return {"Authorization": f"Bearer {name[::-1]}"}


def with_keys(
    model: Path, file: Path, scenario: Callable[[httpx.AsyncClient, Server], Awaitable[None]], **options: Any
) -> None:
    async def go() -> None:
        server = Server(model, keyring=Keyring(file=file), **options)
        async with server.client() as client:
            await scenario(client, server)

    asyncio.run(asyncio.wait_for(go(), 60))


def test_every_route_has_its_scope(tiny_server_model: Path, tmp_path: Path) -> None:
    file = tmp_path / "keys.toml"
    names = ("infer", "metrics", "admin")
    file.write_text("".join(entry(name, scopes=[name]) for name in names))

    async def scenario(client: httpx.AsyncClient, server: Server) -> None:
        app: Any = client._transport.app  # type: ignore[attr-defined]
        paths = {route.path for route in app.routes if hasattr(route, "methods")}
        for path in paths - OPEN - page_files().keys():
            asked = path.replace("{name:path}", "x").replace("{name}", "x")
            wanted = next((scope for scope, some in ROUTES.items() if path in some), "infer")
            assert scope_of(asked) == wanted, path
            assert wanted != "infer" or path.startswith(INFER), f"what is {path} for?"
            for name in names:
                reply = await client.request("OPTIONS", asked, headers=bearer(name))
                if wanted in (None, name):
                    assert reply.status_code not in (401, 403), (path, name)
                else:
                    assert reply.status_code == 403, (path, name)
        reply = await client.get("/metrics", headers=bearer("infer"))
        assert error_of(reply)["code"] == "insufficient_scope" and "metrics" in error_of(reply)["message"]
        assert (await client.get("/metrics", headers={"x-api-key": "unknown"})).status_code == 401
        assert (await client.get("/metrics", headers={"x-api-key": "scirtem"})).status_code == 200

    with_keys(tiny_server_model, file, scenario)


def test_requests_a_minute_and_at_a_time(tiny_server_model: Path, tmp_path: Path) -> None:
    """As openai-python's client is told; another key is not touched by it."""
    file = tmp_path / "keys.toml"
    file.write_text(entry("few", requests_per_minute=2) + entry("one", concurrency=1) + entry("free"))

    async def scenario(client: httpx.AsyncClient, server: Server) -> None:
        for left in (1, 0):
            reply = await client.post("/v1/chat/completions", json=CHAT, headers=bearer("few"))
            assert reply.status_code == 200
            assert reply.headers["x-ratelimit-limit-requests"] == "2"
            assert reply.headers["x-ratelimit-remaining-requests"] == str(left)
            assert 0 < float(reply.headers["x-ratelimit-reset-requests"].removesuffix("s")) <= 60
        sdk = openai.AsyncOpenAI(base_url="http://scripted/v1", api_key="wef", max_retries=0, http_client=client)
        with pytest.raises(openai.RateLimitError) as refused:
            await sdk.chat.completions.create(model="tiny", messages=[{"role": "user", "content": "hi"}])
        assert refused.value.code == "rate_limit_exceeded" and "2 requests a minute" in refused.value.message
        assert 1 <= int(refused.value.response.headers["retry-after"]) <= 30
        assert (await client.get("/v1/models", headers=bearer("few"))).status_code == 200, "computes nothing"
        assert (await client.post("/v1/chat/completions", json=CHAT, headers=bearer("free"))).status_code == 200
        messages = {"model": "tiny", "max_tokens": 4, "messages": [{"role": "user", "content": "hi"}]}
        told = await client.post("/v1/messages", json=messages, headers={"x-api-key": "wef"})
        assert told.status_code == 429 and told.json()["error"]["type"] == "rate_limit_error"

        server.script.step_s = 0.01
        both = [client.post("/v1/chat/completions", json=CHAT, headers=bearer("one")) for _ in range(2)]
        first, second = sorted([reply.status_code for reply in await asyncio.gather(*both)])
        assert (first, second) == (200, 429)
        assert (await client.post("/v1/chat/completions", json=CHAT, headers=bearer("one"))).status_code == 200

    with_keys(tiny_server_model, file, scenario)


def test_tokens_a_minute_and_what_each_key_has_used(tiny_server_model: Path, tmp_path: Path) -> None:
    from entrypoints.server.context import ServerSettings

    file, log = tmp_path / "keys.toml", tmp_path / "usage.jsonl"
    file.write_text(entry("a", tokens_per_minute=40) + entry("b") + entry("ops", scopes=["metrics"]))

    async def scenario(client: httpx.AsyncClient, server: Server) -> None:
        reply = await client.post("/v1/chat/completions", json=CHAT, headers=bearer("a"))
        used = reply.json()["usage"]["total_tokens"]
        assert reply.headers["x-ratelimit-remaining-tokens"] == "40" and 20 < used < 40, "known when it has ended"
        second = await client.post("/v1/chat/completions", json=CHAT, headers=bearer("a"))
        assert second.status_code == 200 and 40 - used <= int(second.headers["x-ratelimit-remaining-tokens"]) < 40
        third = await client.post("/v1/chat/completions", json=CHAT, headers=bearer("a"))
        assert third.status_code == 429 and "40 tokens a minute" in error_of(third)["message"]
        page = (await client.get("/metrics", headers=bearer("ops"))).text
        shown = {
            line.split(" ")[0]: float(line.split(" ")[1])
            for line in page.splitlines()
            if "_key_" in line and line[0] != "#"
        }
        of_a = 'key="a",model_name="tiny"'
        assert shown[f"pageloom_key_requests_total{{{of_a}}}"] == 2
        both = (
            shown[f"pageloom_key_prompt_tokens_total{{{of_a}}}"]
            + shown[f"pageloom_key_generation_tokens_total{{{of_a}}}"]
        )
        assert both == 2 * used
        assert shown[f'pageloom_key_refused_total{{{of_a},quota="tokens"}}'] == 1
        log.rename(tmp_path / "moved")
        assert (await client.post("/v1/chat/completions", json=CHAT, headers=bearer("b"))).status_code == 200
        lines = [json.loads(line) for line in (tmp_path / "moved").read_text().splitlines()]
        assert [line["key"] for line in lines] == ["a", "a"]
        assert lines[0]["prompt_tokens"] + lines[0]["generated_tokens"] == used and lines[0]["error"] is None
        (line,) = map(json.loads, log.read_text().splitlines())
        assert line["key"] == "b" and line["path"] == "/v1/chat/completions" and line["finish_reasons"] == ["stop"]

    with_keys(tiny_server_model, file, scenario, settings=ServerSettings(usage_log=log))


def test_the_core_knows_whose_it_is_and_nobody_finds_anothers_prefixes(tiny_server_model: Path, tmp_path: Path) -> None:
    file = tmp_path / "keys.toml"
    shared = {"shares_cache": True}
    file.write_text(entry("a", weight=3) + entry("b") + entry("c", **shared) + entry("d", **shared))

    async def scenario(client: httpx.AsyncClient, server: Server) -> None:
        for name in "aabcd":
            await client.post("/v1/chat/completions", json=CHAT, headers=bearer(name))
        await client.post("/v1/chat/completions", json={**CHAT, "cache_salt": "mine"}, headers=bearer("a"))
        added = server.core.added
        assert [(each.tenant.name, each.tenant.weight) for each in added[:3]] == [("a", 3.0), ("a", 3.0), ("b", 1.0)]
        salts = [each.cache_salt for each in added]
        assert salts[0] == salts[1] and salts[3] is None and salts[4] is None
        assert len({salts[0], salts[2], salts[5], None}) == 4
        too_long = await client.post(
            "/v1/chat/completions", json={**CHAT, "cache_salt": "x" * 2000}, headers=bearer("a")
        )
        assert error_of(too_long)["param"] == "cache_salt"

    with_keys(tiny_server_model, file, scenario)


def test_stored_responses_are_their_owners(tiny_server_model: Path, tmp_path: Path) -> None:
    file = tmp_path / "keys.toml"
    file.write_text(entry("alice") + entry("bob"))

    async def scenario(client: httpx.AsyncClient, server: Server) -> None:
        asked = {"model": "tiny", "input": "my secret"}
        mine = (await client.post("/v1/responses", json=asked, headers=bearer("alice"))).json()
        path = f"/v1/responses/{mine['id']}"
        assert (await client.get(path, headers=bearer("alice"))).json()["id"] == mine["id"]
        assert (await client.get(f"{path}/input_items", headers=bearer("alice"))).status_code == 200
        for asks in ((client.get, path), (client.get, f"{path}/input_items"), (client.delete, path)):
            assert (await asks[0](asks[1], headers=bearer("bob"))).status_code == 404
        assert (await client.post(f"{path}/cancel", headers=bearer("bob"))).status_code == 404
        item = mine["output"][0]["id"]
        for more in ({"previous_response_id": mine["id"]}, {"input": [{"type": "item_reference", "id": item}]}):
            other = await client.post("/v1/responses", json={**asked, **more}, headers=bearer("bob"))
            assert other.status_code in (400, 404), more
            own = await client.post("/v1/responses", json={**asked, **more}, headers=bearer("alice"))
            assert own.status_code == 200, (more, own.text)
        assert (await client.delete(path, headers=bearer("alice"))).status_code == 200

    with_keys(tiny_server_model, file, scenario)


@given(
    st.integers(1, 600),
    st.integers(1, 3000),
    st.integers(1, 5),
    st.lists(st.tuples(st.sampled_from(["ask", "ask", "end", "wait"]), st.integers(0, 3000)), max_size=60),
)
def test_no_more_is_admitted_than_allowed_and_who_waits_as_told_is_let_in(
    requests: int, tokens: int, running: int, moves: list[tuple[str, int]]
) -> None:
    now, admitted, used, under_way = 100.0, 0, 0, 0
    quotas = Quotas(lambda: now, OwnCounts())
    quotas.set(requests, tokens, running)
    for move, amount in moves:
        if move == "wait":
            now += amount / 100
        elif move == "end" and under_way:
            quotas.end()
            quotas.use(amount)
            under_way, used = under_way - 1, used + amount
        elif move == "ask":
            try:
                quotas.begin()
            except RateLimitedError as error:
                if error.quota == "concurrency":
                    assert under_way == running
                    continue
                assert error.retry_after_s > 0
                now += error.retry_after_s + 1e-6
                for bucket in (quotas._requests, quotas._tokens):
                    assert bucket is not None and bucket.left(now) >= 1
            else:
                admitted, under_way = admitted + 1, under_way + 1
        assert under_way <= running
        assert admitted <= requests + (now - 100) * requests / 60 + 1e-6
        if admitted and used > tokens:
            assert quotas.shown()["tokens"].remaining <= tokens


def test_what_was_lawful_is_no_debt_when_less_is_allowed() -> None:
    now = 100.0
    quotas = Quotas(lambda: now, OwnCounts())
    quotas.set(600, 1000, None)
    for _ in range(500):
        quotas.begin()
    quotas.use(1500)
    quotas.set(10, 100, None)
    left = [each.left(now) for each in (quotas._requests, quotas._tokens) if each is not None]
    assert left == [0, -500], "what was overdrawn still is"
    quotas.set(600, 1000, None)
    assert quotas._requests is not None and quotas._requests.left(now) == 590


def test_under_a_proxys_path_nothing_is_let_through(tiny_server_model: Path, tmp_path: Path) -> None:
    """With and without it, what is guarded is what the router serves."""
    file = tmp_path / "keys.toml"
    file.write_text(entry("one", requests_per_minute=1))

    async def scenario(client: httpx.AsyncClient, server: Server) -> None:
        client._transport.app.root_path = "/llm"  # type: ignore[attr-defined]
        for path in ("/metrics", "/v1/prefixes"):
            for prefix in ("", "/llm"):
                assert (await client.get(prefix + path, headers=bearer("one"))).status_code == 403, prefix + path
        assert (await client.post("/llm/reset_prefix_cache", headers=bearer("one"))).status_code == 403
        assert (await client.get("/llm/health")).status_code == 200
        statuses = [
            (await client.post(f"{prefix}/v1/chat/completions", json=CHAT, headers=bearer("one"))).status_code
            for prefix in ("/llm", "/llm", "")
        ]
        assert statuses == [200, 429, 429]
        told = await client.post("/llm/v1/messages", json={}, headers={"x-api-key": "wrong"})
        assert told.json()["error"]["type"] == "authentication_error" and told.json()["type"] == "error"

    with_keys(tiny_server_model, file, scenario)


def test_whatever_asks_the_model_is_counted(tiny_server_model: Path, tmp_path: Path) -> None:
    """Routes that are posted to are counted, or compute nothing."""
    file = tmp_path / "keys.toml"
    file.write_text(entry("any"))
    harmless = {"/tokenize", "/detokenize", "/v1/messages/count_tokens", "/v1/responses/input_tokens"}
    harmless |= {"/v1/responses/{name}/cancel", "/api/show", "/ping"}

    async def scenario(client: httpx.AsyncClient, server: Server) -> None:
        app: Any = client._transport.app  # type: ignore[attr-defined]
        posted = {route.path for route in app.routes if "POST" in getattr(route, "methods", ())}
        others = {path for path in posted - COUNTED - harmless if scope_of(path) == "infer"}
        assert {path for path in others if not path.startswith("/api/")} == set()
        for path in others:
            reply = await client.post(path, json={"model": "tiny"}, headers=bearer("any"))
            assert reply.status_code >= 400 and not server.core.added, path

    with_keys(tiny_server_model, file, scenario)


def test_nobody_can_name_anothers_salt_and_priorities_have_a_bound(tiny_server_model: Path, tmp_path: Path) -> None:
    file = tmp_path / "keys.toml"
    file.write_text(entry("alice") + entry("bob", shares_cache=True) + entry("urgent", priority_from=-5))
    guesses = [hashlib.sha256(f"alice\0{more}".encode()).hexdigest() for more in ("", "x")] + ["alice"]

    async def scenario(client: httpx.AsyncClient, server: Server) -> None:
        await client.post("/v1/chat/completions", json=CHAT, headers=bearer("alice"))
        for guess in guesses:
            await client.post("/v1/chat/completions", json={**CHAT, "cache_salt": guess}, headers=bearer("bob"))
        salts = [each.cache_salt for each in server.core.added]
        assert salts[0] not in salts[1:]
        for name, priority, param in (("alice", -1, "priority"), ("urgent", -6, "priority")):
            reply = await client.post("/v1/chat/completions", json={**CHAT, "priority": priority}, headers=bearer(name))
            assert reply.status_code == 400 and error_of(reply)["param"] == param
            assert "this key may ask for" in error_of(reply)["message"]

    with_keys(tiny_server_model, file, scenario)


def test_background_responses_are_held_against_concurrency(tiny_server_model: Path, tmp_path: Path) -> None:
    file = tmp_path / "keys.toml"
    file.write_text(entry("one", concurrency=1))

    async def scenario(client: httpx.AsyncClient, server: Server) -> None:
        server.script.stall_at = 2
        asked = {"model": "tiny", "input": "x", "background": True}
        first = await client.post("/v1/responses", json=asked, headers=bearer("one"))
        assert first.status_code == 200
        assert (await client.post("/v1/responses", json=asked, headers=bearer("one"))).status_code == 429
        server.script.stall_at = None
        path = f"/v1/responses/{first.json()['id']}"
        while (await client.get(path, headers=bearer("one"))).json()["status"] in ("queued", "in_progress"):
            await asyncio.sleep(0.02)
        while (await client.post("/v1/responses", json=asked, headers=bearer("one"))).status_code == 429:
            await asyncio.sleep(0.02)  # it is stored, and then over

    with_keys(tiny_server_model, file, scenario)


def test_what_the_engine_refuses_costs_no_tokens(tiny_server_model: Path, tmp_path: Path) -> None:
    from entrypoints.server.context import ServerSettings

    file, log = tmp_path / "keys.toml", tmp_path / "usage.jsonl"
    file.write_text(entry("a", tokens_per_minute=10_000))

    async def scenario(client: httpx.AsyncClient, server: Server) -> None:
        server.script.refuse = ("queue_full", "the queue is full")
        assert (await client.post("/v1/chat/completions", json=CHAT, headers=bearer("a"))).status_code == 503
        server.script.refuse = None
        reply = await client.post("/v1/chat/completions", json=CHAT, headers=bearer("a"))
        assert reply.status_code == 200 and reply.headers["x-ratelimit-remaining-tokens"] == "10000"
        (line,) = map(json.loads, log.read_text().splitlines())
        assert line["error"] is None

    with_keys(tiny_server_model, file, scenario, settings=ServerSettings(usage_log=log))
