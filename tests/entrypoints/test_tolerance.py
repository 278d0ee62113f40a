"""What real clients send and what does no harm is taken; what nobody knows is told of; what would change the answer and
is not supported is refused by name."""

from __future__ import annotations

import asyncio
import logging
from datetime import datetime
from pathlib import Path
from typing import Any

import httpx
import pytest
from openai.types import Model
from pydantic import TypeAdapter
from scripted_server import CHATS, COMPLETIONS, CONTEXT, Server, post_all

from engine.errors import ConfigError
from entrypoints.server.app import create_app
from entrypoints.server.context import ServerSettings
from entrypoints.server.protocol import ChatCompletionRequest, CompletionRequest

CHAT = {"messages": [{"role": "user", "content": "hi"}]}
IGNORED = "x-pageloom-ignored"
WITHOUT_EFFECT = {
    "metadata": {"a": "b"},
    "prediction": {"type": "content", "content": "x"},
    "prompt_cache_key": "k",
    "prompt_cache_retention": "24h",
    "reasoning_effort": "low",
    "safety_identifier": "s",
    "service_tier": "flex",
    "store": True,
    "user": "u",
    "verbosity": "low",
}


def post(server: Server, body: dict[str, Any], path: str = CHATS) -> httpx.Response:
    return post_all(server, (path, body))[0]


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/completions"])
def test_fields_without_effect_are_taken_in_silence(server: Server, path: str) -> None:
    stream = {"stream": True, "stream_options": {"include_usage": True, "include_obfuscation": False}}
    body = {**CHAT, **WITHOUT_EFFECT, **stream} if "chat" in path else {"prompt": "x", **WITHOUT_EFFECT, **stream}
    neutral = {"functions": [], "tools": [], "audio": None, "typical_p": 1.0, "mirostat": 0, "function_call": "none"}
    reply = post(server, body | (neutral if "chat" in path else {"typical_p": 1, "mirostat": 0}), path)
    assert reply.status_code == 200, reply.text
    assert IGNORED not in reply.headers and reply.headers["x-request-id"]


def test_null_is_the_same_as_leaving_out(server: Server) -> None:
    asked = []
    for kind, body, path in ((ChatCompletionRequest, CHAT, CHATS), (CompletionRequest, {"prompt": "x"}, COMPLETIONS)):
        optional = [name for name, field in kind.model_fields.items() if not field.is_required()]
        assert len(optional) > 40
        asked.append((path, {**dict.fromkeys(optional), **body}))
    for reply in post_all(server, *asked):
        assert reply.status_code == 200 and IGNORED not in reply.headers, reply.text


def test_unknown_fields_are_ignored_and_told_of(server: Server, caplog: pytest.LogCaptureFixture) -> None:
    body = {**CHAT, "frobnicate": 1, "a\r\nb: c": 2, "stream": True, "stream_options": {"more": 3}}
    lots = {**CHAT, **{f"{'x' * 200}{i}": 1 for i in range(500)}}
    wrong = {**CHAT, "frobnicate": 1, "temperature": -1}
    with caplog.at_level(logging.INFO, logger="pageloom.server"):
        reply, many, refused = post_all(server, (CHATS, body), (CHATS, lots), (CHATS, wrong))
    assert reply.status_code == 200
    assert reply.headers[IGNORED] == "frobnicate, a??b??c, stream_options.more"
    told = [record.getMessage() for record in caplog.records if "ignored" in record.getMessage()]
    assert len(told) == 3 and "frobnicate" in told[0] and "\n" not in told[0]
    assert many.status_code == 200 and len(many.headers[IGNORED]) < 2000
    assert refused.status_code == 400 and refused.headers[IGNORED] == "frobnicate"


def test_unknown_fields_are_refused_where_the_server_is_strict(tiny_server_model: Path) -> None:
    server = Server(tiny_server_model, settings=ServerSettings(strict_fields=True))
    bodies = [{"frobnicate": 1}, {"stream_options": {"x": 1}}, {"model": None}, WITHOUT_EFFECT]
    asked = [(CHATS, {**CHAT, "model": "tiny", "stream": True, **body}) for body in bodies]
    plain, inner, nameless, known = post_all(server, *asked)
    for reply, param in ((plain, "frobnicate"), (inner, "stream_options.x"), (nameless, "model")):
        assert reply.status_code == 400 and reply.json()["error"]["param"] == param
    assert known.status_code == 200


@pytest.mark.parametrize(
    ("path", "body", "param"),
    [
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": "x" * CONTEXT}]}, "messages"),
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": "x" * 10**5}]}, "messages"),
        ("/v1/completions", {"prompt": "x" * CONTEXT}, "prompt"),
        ("/v1/completions", {"prompt": [5] * CONTEXT}, "prompt"),
    ],
)
def test_what_the_context_does_not_hold_is_said_in_openais_words(
    server: Server, path: str, body: dict[str, Any], param: str
) -> None:
    reply = post(server, body, path)
    error = reply.json()["error"]
    assert (reply.status_code, error["code"], error["param"]) == (400, "context_length_exceeded", param), error
    if len(str(body)) < 10**4:
        assert "maximum context length is 256 tokens" in error["message"]


@pytest.mark.parametrize(
    ("messages", "says"),
    [
        ([{"role": "user"}], "messages[0].content is missing"),
        ([*CHAT["messages"], {"role": "tool", "content": None}], "messages[1].content is missing"),
        (
            [{"role": "user", "content": [{"type": "text", "text": "a"}, {"type": "image_url", "image_url": {}}]}],
            "messages[0].content[1]: image_url is not supported",
        ),
        ([{"role": "user", "content": [{"type": "text"}]}], "messages[0].content[0] must be a text"),
    ],
)
def test_what_a_message_lacks_is_named_by_its_place(server: Server, messages: list[dict[str, Any]], says: str) -> None:
    error = post(server, {"messages": messages}).json()["error"]
    assert error["param"] == "messages" and error["message"].startswith(says), error


@pytest.mark.parametrize("effort", ["none", "minimal", "low", "medium", "high", "xhigh", "max"])
def test_efforts_that_are_known_are_taken(server: Server, effort: str) -> None:
    assert post(server, CHAT | {"reasoning_effort": effort}).status_code == 200


def test_other_efforts_are_refused(server: Server) -> None:
    reply = post(server, CHAT | {"reasoning_effort": "ultra"})
    error = reply.json()["error"]
    assert reply.status_code == 400 and error["param"] == "reasoning_effort" and "'xhigh'" in error["message"]


def test_answers_name_what_made_them(server: Server) -> None:
    one, other = (reply.json() for reply in post_all(server, (CHATS, CHAT), (COMPLETIONS, {"prompt": "x"})))
    assert one["system_fingerprint"] == other["system_fingerprint"]
    assert one["system_fingerprint"].startswith("fp_")


CALLED = '<|assistant|><tool_call>\n{"name": "f", "arguments": {}}\n</tool_call>'


@pytest.mark.parametrize(
    ("given", "rendered"),
    [
        ([{"role": "developer", "content": "d"}], "<|system|>d"),
        ([{"role": "function", "name": "f", "content": "r"}], "<|user|><tool_response>\nr\n</tool_response>"),
        ([{"role": "assistant", "content": None, "tool_calls": [{"function": {"name": "f"}}]}], CALLED),
        ([{"role": "assistant", "function_call": {"name": "f", "arguments": "{}"}}], CALLED),
        ([{"role": "user", "content": [{"type": "input_text", "text": "a"}, "b"]}], "<|user|>a\nb"),
        ([{"role": "assistant", "content": [{"type": "refusal", "refusal": "no"}]}], "<|assistant|>no"),
    ],
)
def test_messages_of_all_kinds_render(server: Server, given: list[dict[str, Any]], rendered: str) -> None:
    assert post(server, {"messages": given}).status_code == 200
    prompt = server.engine.tokenizer.decode(server.core.added[0].prompt_token_ids)
    assert prompt == rendered + "<|assistant|>"


def test_the_model_goes_by_several_names(tiny_server_model: Path) -> None:
    server = Server(tiny_server_model, settings=ServerSettings(model_aliases=("other", "tiny", "third")))

    async def go() -> list[httpx.Response]:
        async with server.client() as client:
            with pytest.raises(ConfigError, match="must not be empty"):
                create_app(server.engine, "tiny", settings=ServerSettings(model_aliases=("",)))
            made = await client.post(CHATS, json={**CHAT, "model": "other"})
            wrong = await client.post(CHATS, json={**CHAT, "model": "fourth"})
            return [made, wrong, await client.get("/v1/models"), await client.get("/v1/models/third")]

    made, wrong, models, one = asyncio.run(go())
    assert made.json()["model"] == "tiny" and wrong.status_code == 404
    assert [each["id"] for each in models.json()["data"]] == ["tiny", "other", "third"]
    assert one.json()["id"] == "third"
    TypeAdapter(Model).validate_python(one.json())
    of_anthropics = {"type": "model", "display_name": "third", "lifecycle": "active", "max_input_tokens": CONTEXT}
    assert of_anthropics.items() <= one.json().items()
    assert datetime.fromisoformat(one.json()["created_at"]).timestamp() == one.json()["created"]
    listed = models.json()
    assert (listed["first_id"], listed["last_id"], listed["has_more"]) == ("tiny", "third", False)
