"""Bodies that no client of good will sends: each is a 400 that names the field, and never a 500."""

from __future__ import annotations

import asyncio
import json
from contextlib import suppress
from typing import Any

import msgspec
import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from pydantic import BaseModel, ValidationError
from scripted_server import Server
from test_closed_connections import leave_after

from engine import SamplingParams
from engine.core.wire import UnpinPrefix
from engine.errors import InvalidRequestError
from entrypoints.server.protocol import ChatCompletionRequest, CompletionRequest

pytestmark = pytest.mark.timeout(60)


def nested(depth: int) -> Any:
    value: Any = "x"
    for _ in range(depth):
        value = [value]
    return value


def message(**fields: Any) -> list[dict[str, Any]]:
    return [{"role": "user", "content": "x", **fields}]


COMPLETIONS: list[tuple[dict[str, Any], str]] = [
    ({"prompt": "\ud83d"}, "prompt"),
    ({"prompt": ["x"] * 2049}, "prompt"),
    ({"prompt": "x" * 5000}, "prompt"),
    ({"prompt": [-1], "echo": True}, "prompt"),
    ({"prompt": [300], "echo": True}, "prompt"),
    ({"stop": "\ud83d"}, "stop"),
    ({"bad_words": ["\ud83d"]}, "bad_words"),
    ({"cache_salt": "\ud83d"}, "cache_salt"),
    ({"priority": 2**64}, "priority"),
    ({"priority": -(2**64)}, "priority"),
    ({"seed": 2**64}, "seed"),
    *(
        ({"logit_bias": {key: 1}}, "logit_bias")
        for key in ("1e3", " 5", "5 ", "٣", "1_0", "+5", "05", "-1", "", "9" * 5000)
    ),
    ({"logit_bias": {"5": 1e300}}, "logit_bias"),
]
CHATS: list[tuple[dict[str, Any], str]] = [
    ({"messages": message(content="\ud83d")}, "messages"),
    ({"messages": message(role="\ud83d")}, "messages"),
    ({"messages": message(role=5)}, "messages"),
    ({"messages": message(content=5)}, "messages"),
    ({"messages": [{"role": "assistant", "content": 5}], "echo": True}, "messages"),
    ({"messages": [{"role": "assistant", "content": [5]}], "echo": True}, "messages"),
    ({"messages": [{"role": "assistant", "content": {"a": 5}}], "echo": True}, "messages"),
    ({"messages": message(extra=nested(600))}, "messages"),
    ({"messages": message() * 4097}, "messages"),
    ({"messages": message(), "chat_template_kwargs": {"messages": 5}}, "chat_template_kwargs"),
    ({"messages": message(), "chat_template_kwargs": {"tools": 5}}, "chat_template_kwargs"),
    ({"messages": message(), "chat_template_kwargs": {"a": nested(600)}}, "chat_template_kwargs"),
    ({"messages": message(), "chat_template_kwargs": {"a": "\ud83d"}}, "chat_template_kwargs"),
]


def test_each_is_refused_by_field_and_the_server_serves_on(server: Server) -> None:
    cases = [("/v1/completions", {"prompt": "x", **body}, field) for body, field in COMPLETIONS]
    cases += [("/v1/chat/completions", body, field) for body, field in CHATS]
    cases += [
        ("/tokenize", {"prompt": "\ud83d"}, "prompt"),
        ("/tokenize", {"prompt": "x" * 20_000}, "prompt"),
        ("/tokenize", {"messages": message(role=5)}, "messages"),
        ("/detokenize", {"tokens": [5] * 2000}, "tokens"),
        ("/detokenize", {"tokens": [2**70]}, "tokens"),
        ("/v1/prefixes", {"name": "\ud83d", "prompt": "x"}, "name"),
        ("/v1/prefixes", {"name": "", "prompt": "x"}, "name"),
        ("/v1/prefixes", {"name": "a" * 300, "prompt": "x"}, "name"),
        ("/v1/prefixes", {"name": "a", "messages": message(role=5)}, "messages"),
        ("/v1/prefixes", {"name": "a", "prompt": "x" * 5000}, "prompt"),
    ]

    async def go() -> list[str]:
        wrong = []
        async with server.client() as client:
            for path, body, field in cases:
                content, headers = json.dumps(body).encode(), {"content-type": "application/json"}
                reply = await client.post(path, content=content, headers=headers)
                error = reply.json().get("error") or {}
                whole = error.get("param") is None and any(w in str(error) for w in ("surrogate", "nesting"))
                if reply.status_code != 400 or not (error.get("param") == field or whole):
                    wrong.append(f"{path} {content[:80]!r} -> {reply.status_code} {reply.text[:200]}")
            good = await client.post("/v1/completions", json={"prompt": "x", "max_tokens": 2})
            assert good.status_code == 200
            assert (await client.get("/v1/prefixes")).json()["data"] == []
        return wrong

    assert asyncio.run(go()) == []
    assert len(server.core.added) == 1


def test_a_client_that_leaves_while_its_prefix_is_computed_pins_nothing(server: Server) -> None:
    sent: list[Any] = []
    send = server.core.send

    def seen(told: Any) -> None:
        sent.append(told)
        send(told)

    async def go() -> None:
        async with server.client() as client:
            server.script.stall_at = 0
            server.core.send = seen  # type: ignore[method-assign]
            await leave_after(server, "/v1/prefixes", b'{"name": "a", "prompt": "x"}', False)
            assert (await client.get("/v1/prefixes")).json()["data"] == []

    asyncio.run(asyncio.wait_for(go(), 30))
    assert [told.name for told in sent if isinstance(told, UnpinPrefix)] == ["a"]


JSON = st.recursive(
    st.none()
    | st.booleans()
    | st.integers()
    | st.sampled_from([2**31, 2**63, -(2**63) - 1, 2**64])
    | st.floats()
    | st.text(max_size=5)
    | st.sampled_from(["1e3", " 5", "٣", "never", "auto", "\ud83d"]),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=4) | st.just("7"), inner, max_size=3),
    max_leaves=6,
)


def fields_of(model: type[BaseModel]) -> st.SearchStrategy[dict[str, Any]]:
    return st.dictionaries(st.sampled_from(sorted(model.model_fields)), JSON, max_size=3)


@given(fields_of(CompletionRequest), fields_of(ChatCompletionRequest))
@example({"guided_json": {"": -(2**63) - 1}}, {})
def test_any_json_in_any_field_gives_parameters_or_a_refusal(completion: dict[str, Any], chat: dict[str, Any]) -> None:
    """And the parameters travel."""
    for model, body, needed in (
        (CompletionRequest, completion, {"prompt": "x"}),
        (ChatCompletionRequest, chat, {"messages": message()}),
    ):
        try:
            request: Any = model.model_validate({**needed, **body})
            limit = request.token_limit(None) if model is ChatCompletionRequest else request.max_tokens
            _, structure = request.structure()
            params = request.sampling_params(SamplingParams(), limit or None, None, request.prompt_logprobs, structure)
            prompts = request.prompts() if model is CompletionRequest else request.messages
        except (ValidationError, InvalidRequestError):
            continue
        assert prompts
        ids = {
            "allowed_token_ids": None,
            "stop_token_ids": None,
            "logit_bias": None,
        }  # refused by the vocabulary's size
        structure, params = params.structured_outputs, msgspec.structs.replace(params, structured_outputs=None, **ids)
        with suppress(UnicodeEncodeError):  # refused at the engine's door, as are numbers of a schema
            msgspec.msgpack.encode(params)
        with suppress(UnicodeEncodeError, OverflowError):
            msgspec.msgpack.encode(structure)


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    ("path", "body"), [("/v1/completions", {"prompt": "x"}), ("/v1/chat/completions", {"messages": message()})]
)
def test_scores_that_cannot_be_shown_end_their_request_alone(
    server: Server, monkeypatch: pytest.MonkeyPatch, path: str, body: dict[str, Any], stream: bool
) -> None:
    class Panic(BaseException):
        pass

    def broken(self: object, token_id: int) -> bytes:
        raise Panic("the tokenizer's own defect")

    asked = {**body, "stream": stream, "logprobs": True if "messages" in body else 1, "max_tokens": 3}

    async def go() -> None:
        async with server.client() as client:
            monkeypatch.setattr("entrypoints.server.token_text.TokenTexts.data", broken)
            reply = await client.post(path, json=asked)
            assert "request_failed" in reply.text and "defect" not in reply.text
            assert (await client.post("/v1/completions", json={"prompt": "x"})).status_code == 200

    asyncio.run(asyncio.wait_for(go(), 30))
