"""`x-request-timeout` and `--default-timeout`: what is late ends, and says so in the words of the API asked."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import httpx
import pytest
from scripted_server import Server, events
from test_http_errors import CHAT, error_of

from entrypoints.server.context import ServerSettings


def with_client(server: Server, scenario: Callable[[httpx.AsyncClient], Awaitable[None]]) -> None:
    async def go() -> None:
        async with server.client() as client:
            await scenario(client)

    asyncio.run(asyncio.wait_for(go(), 60))


def slow(model: Path, **options: Any) -> Server:
    server = Server(model, **options)
    server.script.step_s = 0.02
    return server


LONG = {"prompt": "x", "max_tokens": 200, "ignore_eos": True}
"""four seconds"""


def test_what_is_late_ends_with_504_and_is_aborted(tiny_server_model: Path) -> None:
    server = slow(tiny_server_model)
    server.answer = "x" * 220

    async def scenario(client: httpx.AsyncClient) -> None:
        late = {"x-request-timeout": "1.5"}
        reply = await client.post("/v1/completions", json=LONG, headers=late)
        assert reply.status_code == 504 and error_of(reply)["code"] == "deadline_exceeded"
        assert error_of(reply)["type"] == "timeout_error"
        assert len(server.core.aborted) == 1
        assert 0 < (server.core.added[0].deadline_s or 0) <= 1.5, "what is left of it"
        messages = {"model": "tiny", "max_tokens": 200, "messages": [{"role": "user", "content": "hi"}]}
        reply = await client.post("/v1/messages", json=messages, headers=late)
        assert reply.status_code == 504 and reply.json()["error"]["type"] == "timeout_error"
        reply = await client.post("/v1/completions", json={**LONG, "stream": True}, headers=late)
        assert reply.status_code == 200
        *tokens, last = [line for line in reply.text.splitlines() if line.startswith("data:")]
        assert tokens and "deadline_exceeded" in last, "what had come was given"
        reply = await client.post(
            "/v1/completions", json={**LONG, "max_tokens": 3}, headers={"x-request-timeout": "30"}
        )
        assert reply.status_code == 200
        assert (await client.post("/v1/completions", json={**LONG, "max_tokens": 3})).status_code == 200
        assert server.core.added[-1].deadline_s is None

    with_client(server, scenario)


def test_prompts_of_a_body_that_take_turns_have_one_time(tiny_server_model: Path) -> None:
    """Two at a time, half a second each: ten seconds in all, of which one and a bit are given to all together."""
    server = slow(tiny_server_model, max_waiting=4)
    server.answer = "x" * 30

    async def scenario(client: httpx.AsyncClient) -> None:
        body = {"prompt": ["x"] * 40, "max_tokens": 25, "ignore_eos": True}
        reply = await client.post("/v1/completions", json=body, headers={"x-request-timeout": "1.2"})
        assert reply.status_code == 504 and error_of(reply)["code"] == "deadline_exceeded"
        assert 2 <= len(server.core.added) < 40, "the others had not begun"

    with_client(server, scenario)


def test_who_serves_may_set_it_and_a_header_says_otherwise(tiny_server_model: Path) -> None:
    server = slow(tiny_server_model, settings=ServerSettings(default_timeout=0.2))
    server.answer = "x" * 220

    async def scenario(client: httpx.AsyncClient) -> None:
        assert (await client.post("/v1/completions", json=LONG)).status_code == 504
        short = {**LONG, "max_tokens": 20}
        assert (
            await client.post("/v1/completions", json=short, headers={"X-Request-Timeout": "20"})
        ).status_code == 200

    with_client(server, scenario)


@pytest.mark.parametrize("given", ["", "soon", "0", "-1", "nan", "inf", "1e9", "86401"])
def test_a_time_that_is_none_is_refused(tiny_server_model: Path, given: str) -> None:
    async def scenario(client: httpx.AsyncClient) -> None:
        reply = await client.post("/v1/chat/completions", json=CHAT, headers={"x-request-timeout": given})
        assert reply.status_code == 400 and error_of(reply)["param"] == "x-request-timeout"

    with_client(Server(tiny_server_model), scenario)


def test_a_stream_in_time_is_not_touched(tiny_server_model: Path) -> None:
    async def scenario(client: httpx.AsyncClient) -> None:
        body = {"prompt": "x", "max_tokens": 8, "stream": True}
        reply = await client.post("/v1/completions", json=body, headers={"x-request-timeout": "20"})
        assert events(reply.text)[-1]["choices"][0]["finish_reason"] is not None

    with_client(Server(tiny_server_model), scenario)


def test_a_refusal_says_what_was_asked_for_beside_what_is_left_of_it(tiny_server_model: Path) -> None:
    server = Server(tiny_server_model)
    server.script.refuse = ("too_short", "1.93 s are too short")
    of_messages = {"model": "tiny", "max_tokens": 9, "messages": [{"role": "user", "content": "hi"}]}

    async def scenario(client: httpx.AsyncClient) -> None:
        for path, body in (("/v1/completions", LONG), ("/v1/messages", of_messages)):
            reply = await client.post(path, json=body, headers={"x-request-timeout": "2"})
            told = error_of(reply)["message"] if path == "/v1/completions" else reply.json()["error"]["message"]
            assert told == "1.93 s are too short (asked for: x-request-timeout: 2)"
        reply = await client.post("/v1/completions", json=LONG)
        assert reply.status_code == 503 and error_of(reply)["message"] == "1.93 s are too short"

    with_client(server, scenario)
