"""Who is let in, what the server says of itself, and what it keeps to its log."""

from __future__ import annotations

import asyncio
import logging
import os
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import httpx
import pytest
from scripted_server import Server
from test_http_errors import CHAT, error_of

from engine.errors import ConfigError
from entrypoints import serve
from entrypoints.server.api_key import OPEN_PATHS, VARIABLE, take_api_key
from entrypoints.server.page.routes import page_files


def with_client(server: Server, scenario: Callable[[httpx.AsyncClient], Awaitable[None]]) -> None:
    async def go() -> None:
        async with server.client() as client:
            await scenario(client)

    asyncio.run(asyncio.wait_for(go(), 60))


def test_the_key_guards_every_route_but_liveness_and_readiness(tiny_server_model: Path) -> None:
    server = Server(tiny_server_model, api_key="secret", allowed_origins=["https://a.example"])

    async def scenario(client: httpx.AsyncClient) -> None:
        app: Any = client._transport.app  # type: ignore[attr-defined]
        routes = [route for route in app.routes if hasattr(route, "methods")]
        assert len(routes) > 12
        for route in routes:
            for method in route.methods - {"HEAD"}:
                reply = await client.request(method, route.path.replace("{name:path}", "x"))
                if route.path in page_files():
                    assert reply.status_code == 200
                elif route.path in OPEN_PATHS:
                    told = b'{"kv_role":null,"kv_layout":{}}' if route.path == "/health" else b""
                    assert reply.status_code == 200 and reply.content == told
                else:
                    assert reply.status_code == 401, route.path
                    if not route.path.startswith(("/v1/messages", "/api/")):  # whose errors are others'
                        assert error_of(reply)["code"] == "invalid_api_key", route.path
                    assert reply.headers["www-authenticate"] == "Bearer" and reply.headers["x-request-id"]
        assert (await client.get("/no-such-route")).status_code == 401
        for given in ("Bearer secret", "bearer secret", "BEARER  secret ", "bEaReR secret"):
            assert (await client.get("/v1/models", headers={"Authorization": given})).status_code == 200, given
        for given in ("Bearer wrong", "Basic secret", "secret", "Bearer", "Bearer secrets", "Bearer secret secret", ""):
            assert (await client.get("/v1/models", headers={"Authorization": given})).status_code == 401, given
        twice = [("Authorization", "Bearer wrong"), ("Authorization", "Bearer secret")]
        assert (await client.get("/v1/models", headers=twice)).status_code == 401
        preflight = {"Origin": "https://a.example", "Access-Control-Request-Method": "POST"}
        allowed = await client.options("/v1/completions", headers=preflight)
        assert allowed.status_code == 200 and allowed.headers["access-control-allow-origin"] == "https://a.example"

    with_client(server, scenario)


@pytest.mark.parametrize("allowed", [[], ["https://a.example"], ["*"]])
def test_pages_of_other_origins_can_ask_nothing_that_a_browser_would_not_ask_leave_for(
    tiny_server_model: Path, allowed: list[str]
) -> None:
    """Neither routes without a body, nor bodies of a form's types, or of none."""
    server = Server(tiny_server_model, allowed_origins=allowed)
    own, listed, strange = (
        "http://test.example",
        "https://a.example",
        ("https://b.example", "null", "http://test.example.b"),
    )

    async def scenario(client: httpx.AsyncClient) -> None:
        app: Any = client._transport.app  # type: ignore[attr-defined]
        paths = [route.path for route in app.routes if "POST" in (getattr(route, "methods", None) or ())]
        assert "/reset_prefix_cache" in paths and len(paths) > 20

        async def ask(path: str, origin: str | None, kind: str | None) -> httpx.Response:
            headers = {"host": "test.example"} | ({"origin": origin} if origin else {})
            headers |= {"content-type": kind} if kind else {}
            return await client.post(path.replace("{name}", "x"), content=b"{}", headers=headers)

        for path in paths:
            for kind in (None, "text/plain", "application/x-www-form-urlencoded", "text/plain;application/json"):
                for origin in strange:
                    status = (await ask(path, origin, kind)).status_code
                    assert (status == 403) == (allowed != ["*"]), (path, origin, kind)
                assert ((await ask(path, listed, kind)).status_code == 403) == (not allowed), path
                for friend in (own, None):
                    assert (await ask(path, friend, kind)).status_code != 403, path
            assert (await ask(path, strange[0], "Application/JSON; charset=utf-8")).status_code != 403, path
        reset = await ask("/reset_prefix_cache", strange[0], "text/plain")
        if allowed != ["*"]:
            assert error_of(reset)["code"] == "origin_not_allowed"

    with_client(server, scenario)


def test_the_key_comes_from_a_file_or_the_environment_and_no_child_inherits_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    file = tmp_path / "key"
    file.write_text("from-file\n")
    assert take_api_key(None, None) is None
    monkeypatch.setenv(VARIABLE, "from-environment")
    assert take_api_key(None, None) == "from-environment" and VARIABLE not in os.environ
    monkeypatch.setenv(VARIABLE, "from-environment")
    assert take_api_key(None, file) == "from-file" and VARIABLE not in os.environ
    assert not caplog.records
    assert take_api_key("given", None) == "given"
    assert "--api-key-file" in caplog.text and "given" not in caplog.text


@pytest.mark.parametrize("content", [b"", b"\n", b"two words", b"two\nlines", "schlüssel".encode(), b"\xff"])
def test_a_key_that_no_client_could_send_is_refused(tmp_path: Path, content: bytes) -> None:
    file = tmp_path / "key"
    file.write_bytes(content)
    with pytest.raises(ConfigError, match="--api-key-file"):
        take_api_key(None, file)
    with pytest.raises(ConfigError, match="nowhere"):
        take_api_key(None, tmp_path / "nowhere")


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["--port", "99999"], "0 to 65535"),
        (["--port", "-1"], "0 to 65535"),
        (["--port", "http"], "0 to 65535"),
        (["--shutdown-timeout", "-1"], "seconds"),
        (["--shutdown-timeout", "nan"], "seconds"),
        (["--api-key", "k", "--api-key-file", "f"], "not allowed with"),
    ],
)
def test_doors_refuse_what_cannot_hold(arguments: list[str], says: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        serve.build_parser().parse_args(arguments)
    assert ended.value.code == 2
    told = capsys.readouterr().err
    assert arguments[0] in told and says in told


def test_every_answer_carries_a_request_id_the_clients_own_where_it_is_sane(server: Server) -> None:
    async def scenario(client: httpx.AsyncClient) -> None:
        for path in ("/live", "/v1/models", "/nothing", "/metrics"):
            assert len((await client.get(path)).headers["x-request-id"]) == 16
        stream = await client.post("/v1/completions", json={"prompt": "x", "max_tokens": 1, "stream": True})
        assert stream.headers["x-request-id"]
        for own in ("abc-1", "x" * 128, "!~"):
            assert (await client.get("/live", headers={"X-Request-Id": own})).headers["x-request-id"] == own
        for bad in (b"", b"x" * 129, b"a b", b"\xff", b"a\tb"):
            got = (await client.get("/live", headers={b"X-Request-Id": bad})).headers["x-request-id"]
            assert len(got) == 16 and got.encode() != bad

    with_client(server, scenario)


@pytest.mark.parametrize("stream", [False, True])
def test_what_goes_wrong_inside_is_a_line_for_the_client_and_the_rest_for_the_log(
    server: Server, stream: bool, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    secret = "Traceback (most recent call last):\n  File /secret/place\nKeyError: 'detail'"

    async def scenario(client: httpx.AsyncClient) -> None:
        server.script.refuse = ("fault", secret)
        failed = await client.post("/v1/chat/completions", json={**CHAT, "stream": stream})

        def broken(self: object) -> None:
            raise KeyError(secret)

        monkeypatch.setattr(type(server.engine), "default_sampling_params", broken)
        unexpected = await client.post("/v1/chat/completions", json={**CHAT, "stream": stream})
        for reply, code in ((failed, "request_failed"), (unexpected, "internal_error")):
            error = error_of(reply)
            assert reply.status_code == 500 and error["code"] == code
            assert "Traceback" not in reply.text and "secret" not in reply.text and "\n" not in error["message"]
            request_id = reply.headers["x-request-id"]
            assert request_id in error["message"] and request_id in caplog.text
        assert "/secret/place" in caplog.text

    with caplog.at_level(logging.WARNING):
        with_client(server, scenario)


def test_a_stalled_core_is_neither_ready_nor_healthy_and_recovers(
    server: Server, caplog: pytest.LogCaptureFixture
) -> None:
    async def states(client: httpx.AsyncClient) -> list[int]:
        return [(await client.get(path)).status_code for path in ("/live", "/ready", "/health")]

    async def scenario(client: httpx.AsyncClient) -> None:
        assert await states(client) == [200, 200, 200]
        server.script.stalled = "no heartbeat for 11.0 s while in /secret/place"
        assert await states(client) == [200, 503, 503]
        reply = await client.get("/health")
        assert error_of(reply)["code"] == "engine_stalled" and "secret" not in reply.text
        server.script.stalled = None
        assert await states(client) == [200, 200, 200]
        app: Any = client._transport.app  # type: ignore[attr-defined]
        app.state.draining = True
        assert await states(client) == [200, 503, 200]
        app.state.draining = False
        server.core.die()
        await asyncio.sleep(0.05)
        assert await states(client) == [200, 503, 503]

    with_client(server, scenario)
    assert sum("seems to hang" in line for line in caplog.messages) == 1, "told once, not at each question"
    assert sum("makes progress again" in line for line in caplog.messages) == 1


def test_no_answer_redirects_to_the_host_that_the_client_names(server: Server) -> None:
    async def scenario(client: httpx.AsyncClient) -> None:
        for path in ("/health/", "/v1/models/", "/v1/completions/", "/metrics/"):
            for method in ("GET", "POST"):
                reply = await client.request(method, path, headers={"Host": "evil.example"})
                assert reply.status_code in (404, 405) and "location" not in reply.headers
                assert "evil.example" not in reply.text

    with_client(server, scenario)


@pytest.mark.parametrize(
    "body",
    [
        {"prompt": ["a", 1] * 200_000},
        {"prompt": [1.5] * 400_000},
        {"prompt": "x", "stop": [1] * 400_000},
        {"prompt": "x", "bad_words": [1] * 400_000},
        {"prompt": "x", "stop_token_ids": ["a"] * 400_000},
    ],
)
def test_of_many_wrong_items_one_is_told(server: Server, body: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    """pydantic makes an error of each, which took twenty seconds on the event loop."""
    from entrypoints.server import errors

    counted: list[int] = []
    describe = errors.validation_body
    monkeypatch.setattr(errors, "validation_body", lambda e, kind: counted.append(len(e)) or describe(e, kind))

    async def scenario(client: httpx.AsyncClient) -> None:
        reply = await client.post("/v1/completions", json=body)
        assert reply.status_code == 400 and error_of(reply)["param"] == list(body)[-1]
        assert counted[0] <= 8

    with_client(server, scenario)
