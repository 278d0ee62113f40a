"""How Ollama's routes fail: in its shape, by name, and no more than the one request."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import Any

import httpx
import ollama
import pytest
from scripted_server import Server, post_all
from test_closed_connections import leave_after
from test_hostile_requests import JSON, nested
from test_ollama_api import CHAT, GENERATE, HI, with_sdk
from test_openapi import ask as request_all
from test_openapi import check
from test_tools import ADD

from entrypoints.server.context import ServerSettings

pytestmark = pytest.mark.timeout(300)


def error_of(reply: httpx.Response) -> str:
    body = reply.json()
    assert set(body) == {"error"} and isinstance(body["error"], str) and body["error"], body
    return str(body["error"])


def call(**fields: Any) -> list[dict[str, Any]]:
    return [{"role": "assistant", "tool_calls": [{"function": {"name": "f"}, **fields}]}]


@pytest.mark.parametrize(
    ("path", "body", "says"),
    [
        (CHAT, {"messages": "hi"}, "messages"),
        (CHAT, {"messages": [5]}, "messages"),
        (CHAT, {"messages": [{}]}, "messages[0] must be an object with a role"),
        (CHAT, {"messages": [{"role": "alien", "content": "x"}]}, "messages[0].role"),
        (CHAT, {"messages": [{"role": "user", "content": 5}]}, "messages[0].content"),
        (CHAT, {"messages": [{"role": "user", "content": "x", "images": ["aGk="]}]}, "messages[0].images"),
        (CHAT, {"messages": call(function=5)}, "messages[0].tool_calls[0]"),
        (CHAT, {"messages": [{"role": "assistant", "tool_calls": 5}]}, "messages[0].tool_calls"),
        (CHAT, {"messages": HI * 4097}, "messages: at most 4096"),
        (CHAT, {"messages": [{"role": "user", "content": "x" * 300}]}, "context length is 256"),
        (CHAT, {"messages": HI, "tools": [5]}, "tools"),
        (
            CHAT,
            {"messages": HI, "tools": [{"type": "function", "function": {"name": "a b"}}]},
            "tools[0].function.name",
        ),
        (CHAT, {"messages": HI, "tools": [ADD, ADD]}, "two of the name 'add'"),
        (CHAT, {"messages": HI, "format": "xml"}, "format must be"),
        (CHAT, {"messages": HI, "format": 5}, "format"),
        (CHAT, {"messages": HI, "format": {"type": "nothing"}}, "format"),
        (CHAT, {"messages": HI, "think": "very"}, "think"),
        (CHAT, {"messages": HI, "stream": "maybe"}, "stream"),
        (CHAT, {"messages": HI, "options": 5}, "options"),
        (CHAT, {"messages": HI, "options": {"temperature": "warm"}}, "options.temperature"),
        (CHAT, {"messages": HI, "options": {"temperature": -1}}, "temperature must be"),
        (CHAT, {"messages": HI, "options": {"num_predict": -3}}, "num_predict"),
        (CHAT, {"messages": HI, "options": {"num_predict": 2**40}}, "num_predict"),
        (CHAT, {"messages": HI, "options": {"repeat_penalty": 0}}, "repeat_penalty must be"),
        (CHAT, {"messages": HI, "options": {"mirostat": 1}}, "mirostat is not supported"),
        (CHAT, {"messages": HI, "options": {"typical_p": 0.5}}, "typical_p is not supported"),
        (CHAT, {"messages": HI, "options": {"stop": [""]}}, "stop must not"),
        (CHAT, {"messages": HI, "options": {"stop": ["a"] * 65}}, "stop: at most 64"),
        (CHAT, {"messages": HI, "options": {"seed": 2**70}}, "seed"),
        (CHAT, {"messages": HI, "logprobs": True, "top_logprobs": 21}, "top_logprobs"),
        (CHAT, {"messages": HI, "top_logprobs": -1}, "top_logprobs"),
        (CHAT, {"messages": HI, "_debug_render_only": True}, "_debug_render_only is not supported"),
        (GENERATE, {"prompt": 5}, "prompt"),
        (GENERATE, {"prompt": "x" * 300}, "context length is 256"),
        (GENERATE, {"prompt": "x", "raw": True, "system": "s"}, "system cannot be combined with raw"),
        (GENERATE, {"prompt": "x", "raw": True, "context": [5]}, "context cannot be combined with raw"),
        (GENERATE, {"prompt": "x", "raw": True, "suffix": "s"}, "suffix cannot be combined with raw"),
        (GENERATE, {"prompt": "x", "suffix": "y"}, "suffix: this model cannot fill in"),
        (GENERATE, {"prompt": "x", "context": [999]}, "token id 999"),
        (GENERATE, {"prompt": "x", "context": [5] * 300}, "context length is 256"),
        (GENERATE, {"prompt": "x", "context": ["a"]}, "context"),
        (GENERATE, {"prompt": "x", "template": "{{ .Prompt }}"}, "template is not supported"),
        (GENERATE, {"prompt": "x", "images": ["aGk="]}, "images is not supported"),
        (CHAT, {"messages": [{"role": "user", "content": "x", "more": nested(600)}]}, "nesting"),
        (CHAT, {"messages": [{"role": "user", "content": "\ud83d"}]}, "surrogate"),
        (GENERATE, {"prompt": "\ud83d"}, "surrogate"),
    ],
)
def test_what_is_wrong_is_said_by_name(tiny_server_model: Path, path: str, body: dict[str, Any], says: str) -> None:
    server = Server(tiny_server_model)

    async def go() -> None:
        async with server.client() as client:
            for stream in (True, False):
                reply = await client.post(path, content=json.dumps({"stream": stream, **body}))
                assert reply.status_code == 400 and says in error_of(reply), reply.text
            assert (await client.post(CHAT, json={"messages": HI})).status_code == 200

    asyncio.run(asyncio.wait_for(go(), 60))
    assert len(server.core.added) == 1


def test_what_another_server_does_is_refused_by_name(tiny_server_model: Path) -> None:
    async def scenario(client: ollama.AsyncClient) -> None:
        digest = "sha256:" + "0" * 64
        asked = {
            "pull": client.pull("tiny"),
            "push": client.push("tiny"),
            "create": client.create("new", from_="tiny"),
            "copy": client.copy("tiny", "new"),
            "delete": client.delete("tiny"),
        }
        for name, asking in asked.items():
            with pytest.raises(ollama.ResponseError) as error:
                await asking
            assert error.value.status_code == 404 and error.value.error.startswith(f"/api/{name} is not served here: ")
        posted = await client._client.post(f"/api/blobs/{digest}", content=b"x" * 1000)
        assert posted.status_code == 404 and "/api/blobs" in error_of(posted)
        assert (await client._client.head(f"/api/blobs/{digest}")).status_code == 404

    with_sdk(Server(tiny_server_model), scenario)


def test_keys_names_paths_and_sizes_fail_in_ollamas_shape(tiny_server_model: Path) -> None:
    server = Server(tiny_server_model, api_key="secret")

    async def go() -> None:
        async with server.client() as client:
            key = {"Authorization": "Bearer secret"}
            big = b'{"a": "' + b"x" * 33 * 1024 * 1024 + b'"}'
            for reply, status in (
                (await client.get("/api/tags"), 401),
                (await client.post(CHAT, json={"messages": HI}), 401),
                (await client.post("/api/pull", json={"model": "x"}), 401),
                (await client.get("/api/tags", headers=key), 200),
                (await client.post(CHAT, json={"messages": HI}, headers=key), 200),
                (await client.post("/api/show", json={"model": "other"}, headers=key), 404),
                (await client.get("/api/nothing", headers=key), 404),
                (await client.get("/api", headers=key), 404),
                (await client.get(CHAT, headers=key), 405),
                (await client.post(CHAT, content=b"{", headers=key), 400),
                (await client.post(CHAT, content=b"[]", headers=key), 400),
                (await client.post(CHAT, headers=key), 400),
                (await client.post(CHAT, content=big, headers=key), 413),
            ):
                assert reply.status_code == status, reply.text
                assert status == 200 or error_of(reply)
            assert (await client.head("/")).status_code == 200  # where its program looks for a server: the page
            sdk = ollama.AsyncClient(host="http://scripted", transport=client._transport, headers=key)
            assert (await sdk.list()).models
            with pytest.raises(ollama.ResponseError, match="API key"):
                await ollama.AsyncClient(host="http://scripted", transport=client._transport).list()

    asyncio.run(asyncio.wait_for(go(), 60))


@pytest.mark.parametrize("stream", [False, True])
def test_a_full_queue_and_a_fault(tiny_server_model: Path, stream: bool) -> None:
    for refused, status in (("queue_full", 503), ("fault", 500)):
        server = Server(tiny_server_model)
        server.script.refuse = (refused, "because")
        (reply,) = post_all(server, (CHAT, {"messages": HI, "stream": stream}))
        assert reply.status_code == status and error_of(reply)
        assert ("retry-after" in reply.headers) == (status == 503)


def test_a_stream_that_fails_says_so_in_its_last_line(tiny_server_model: Path) -> None:
    server = Server(tiny_server_model)
    server.script.die_at = 3

    async def scenario(client: ollama.AsyncClient) -> None:
        seen = 0
        with pytest.raises(ollama.ResponseError, match="the engine is not running"):
            async for _ in await client.chat("tiny", messages=HI, stream=True):
                seen += 1
        assert seen

    with_sdk(server, scenario)


@pytest.mark.parametrize("stall_at", [0, 2])
@pytest.mark.parametrize("stream", [b"false", b"true"])
@pytest.mark.parametrize("body", [b'"messages": [{"role": "user", "content": "x"}]', b'"prompt": "x"'])
def test_a_client_that_leaves_aborts(tiny_server_model: Path, body: bytes, stream: bytes, stall_at: int) -> None:
    server = Server(tiny_server_model)

    async def go() -> None:
        async with server.client():
            server.script.stall_at = stall_at
            path = CHAT if b"messages" in body else GENERATE
            await leave_after(server, path, b'{%s, "stream": %s}' % (body, stream), stream == b"true" and stall_at > 0)
            await asyncio.sleep(0.05)
            assert len(server.core.aborted) == len(server.core.added) == 1 and not server.core.running

    asyncio.run(asyncio.wait_for(go(), 30))


def test_servers_that_are_strict_refuse_what_nobody_knows(tiny_server_model: Path) -> None:
    server = Server(tiny_server_model, settings=ServerSettings(strict_fields=True))
    bodies = [
        {"frobnicate": 1},
        {"options": {"warp": 1}},
        {"model": None},
        {"keep_alive": 5, "options": {"num_ctx": 1}},
    ]
    plain, inner, nameless, known = post_all(
        server, *((CHAT, {"model": "tiny", "messages": HI, **body}) for body in bodies)
    )
    for reply, name in ((plain, "frobnicate"), (inner, "options.warp"), (nameless, "model")):
        assert reply.status_code == 400 and error_of(reply).startswith(name)
    assert known.status_code == 200


def test_the_document_tells_what_is_sent(tiny_server_model: Path) -> None:
    whole = {"messages": HI, "stream": False}
    asked = [("GET", "/openapi.json", None), ("POST", CHAT, whole), ("POST", CHAT, {"messages": HI})]
    asked += [("POST", GENERATE, {"prompt": "x", "stream": False}), ("POST", GENERATE, {"prompt": "x"})]
    asked += [("GET", "/api/tags", None), ("GET", "/api/ps", None), ("POST", "/api/show", {})]
    asked += [("POST", CHAT, {"messages": 5})]
    described, chat, chats, prompt, prompts, tags, ps, show, refused = request_all(Server(tiny_server_model), *asked)
    document = described.json()

    def schema(path: str, method: str = "post", kind: str = "application/json", status: str = "200") -> dict[str, Any]:
        content: dict[str, Any] = document["paths"][path][method]["responses"][status]["content"]
        return content[kind]["schema"]  # type: ignore[no-any-return]

    for path, one, many in ((CHAT, chat, chats), (GENERATE, prompt, prompts)):
        check(document, schema(path), one.json())
        for line in many.text.splitlines():
            check(document, schema(path, kind="application/x-ndjson"), json.loads(line))
    check(document, schema("/api/tags", "get"), tags.json())
    check(document, schema("/api/ps", "get"), ps.json())
    check(document, schema("/api/show"), show.json())
    check(document, schema(CHAT, status="400"), refused.json())
    assert "/api/pull" not in document["paths"]


def test_bodies_of_anything_never_fail_inside(tiny_server_model: Path) -> None:
    from hypothesis import HealthCheck, given, settings
    from hypothesis import strategies as st

    from entrypoints.server.ollama_api.fields import ChatRequest, GenerateRequest, Options

    server = Server(tiny_server_model)
    names = sorted({*ChatRequest.model_fields, *GenerateRequest.model_fields})
    options = st.dictionaries(st.sampled_from(sorted(Options.model_fields)), JSON, max_size=3)
    bodies = st.dictionaries(st.sampled_from(names), JSON, max_size=3)

    async def go() -> None:
        async with server.client() as client:
            loop = asyncio.get_running_loop()

            @settings(max_examples=80, deadline=None, suppress_health_check=list(HealthCheck))
            @given(bodies, options, st.sampled_from([CHAT, GENERATE]))
            def never_500(body: dict[str, Any], inner: dict[str, Any], path: str) -> None:
                told = json.dumps({"messages": HI, "prompt": "x", "options": inner, **body})
                sent = asyncio.run_coroutine_threadsafe(client.post(path, content=told), loop)
                reply = sent.result()
                assert reply.status_code in (200, 400, 404), reply.text
                assert reply.status_code == 200 or error_of(reply)

            await asyncio.to_thread(never_500)

    asyncio.run(go())
