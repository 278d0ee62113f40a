"""A client that leaves aborts its requests at once, whatever they are doing."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
from scripted_server import Server

from entrypoints.server.app import create_app

CHAT = {"messages": [{"role": "user", "content": "hi"}]}


async def leave_after(server: Server, path: str, body: bytes, first_chunk: bool, **app_options: Any) -> list[Any]:
    """Call the application as uvicorn does; the client leaves once requests run (or its first bytes have come)."""
    app = create_app(server.engine, "tiny", **app_options)
    requests = [{"type": "http.request", "body": body, "more_body": False}]
    left = asyncio.Event()
    sent: list[Any] = []

    async def receive() -> Any:
        if requests:
            return requests.pop()
        await left.wait()
        return {"type": "http.disconnect"}

    async def send(message: Any) -> None:
        sent.append(message)
        if message.get("body"):
            left.set()

    scope = {
        "type": "http",
        "asgi": {"version": "3.0"},
        "http_version": "1.1",
        "method": "POST",
        "path": path,
        "raw_path": path.encode(),
        "query_string": b"",
        "scheme": "http",
        "headers": [(b"content-type", b"application/json"), (b"origin", b"https://a.example")],
        "server": ("s", 80),
        "client": ("c", 1),
    }
    call = asyncio.create_task(app(scope, receive, send))
    if not first_chunk:
        while not server.core.added:
            await asyncio.sleep(0.005)
        await asyncio.sleep(0.05)
        left.set()
    await asyncio.wait_for(call, 5)
    return sent


@pytest.mark.parametrize("options", [{}, {"keyring": None, "allowed_origins": ["*"]}])
@pytest.mark.parametrize("stall_at", [0, 2])
@pytest.mark.parametrize(
    ("path", "fields", "sequences"),
    [
        ("/v1/completions", b'"prompt": ["a", "b"], "n": 2', 4),
        ("/v1/completions", b'"prompt": ["a", "b"], "n": 2, "stream": true', 4),
        ("/v1/completions", b'"prompt": "a", "n": 2, "stream": true, "echo": true, "logprobs": 1', 2),
        ("/v1/chat/completions", b'"messages": [{"role": "user", "content": "x"}]', 1),
        ("/v1/chat/completions", b'"messages": [{"role": "user", "content": "x"}], "stream": true', 1),
    ],
)
def test_leaving_aborts_every_sequence(
    server: Server, path: str, fields: bytes, sequences: int, stall_at: int, options: dict[str, Any]
) -> None:
    """Before the first token and in the middle; whole and streamed; also behind the CORS middleware."""

    async def go() -> list[Any]:
        async with server.client():
            server.script.stall_at = stall_at
            streams = b"stream" in fields
            sent = await leave_after(server, path, b"{" + fields + b"}", streams and stall_at > 0, **options)
            assert len(server.core.added) == sequences
            assert server.core.aborted == {r.request_id for r in server.core.added}
            await asyncio.sleep(0.05)
            assert server.core.running == 0 and not server.engine._require().streams
            return sent

    sent = asyncio.run(asyncio.wait_for(go(), 20))
    assert not any(m["type"] == "http.response.body" and not m.get("more_body") and m.get("body") for m in sent)


def test_one_bad_prompt_of_many_aborts_the_others(server: Server) -> None:
    async def go() -> None:
        async with server.client() as client:
            server.script.stall_at = 1
            for stream in (False, True):
                body = {"prompt": [[5], [6], [10**6]], "stream": stream}
                reply = await client.post("/v1/completions", json=body)
                assert reply.status_code == 400
                assert server.core.aborted == {r.request_id for r in server.core.added}

    asyncio.run(asyncio.wait_for(go(), 20))
