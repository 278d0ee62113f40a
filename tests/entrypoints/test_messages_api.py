"""Anthropic's Messages API over HTTP: what comes back, whole and streamed, and how it fails."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import Any

import httpx
import jsonschema
import pytest
from scripted_server import ANSWER, Server, parts, post_all, save_model
from test_tools import CALL, OTHER, TEMPLATE, prompt_of

MESSAGES, COUNT = "/v1/messages", "/v1/messages/count_tokens"
ASKED: dict[str, Any] = {"model": "tiny", "max_tokens": 400, "messages": [{"role": "user", "content": "hi"}]}
SCHEMA = {"type": "object", "properties": {"a": {"type": "integer"}, "b": {"type": "string"}}}
ADD = {"name": "add", "description": "adds", "input_schema": SCHEMA}
NOW = {"type": "custom", "name": "now", "input_schema": {"type": "object"}}
SEARCH = {"type": "web_search_20250305", "name": "web_search", "max_uses": 5}
NOTHING_READ = {
    "cache_creation_input_tokens": 0,
    "cache_read_input_tokens": 0,
    "cache_creation": None,
    "inference_geo": None,
    "output_tokens_details": None,
    "server_tool_use": None,
    "service_tier": "standard",
}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_model(tmp_path_factory.mktemp("messages") / "tiny", template=TEMPLATE, context=4096)


def ask(model: Path, answer: str, body: dict[str, Any], **script: Any) -> tuple[dict[str, Any], Server]:
    """The whole message, after it was found to be the same when streamed."""
    server = Server(model)
    server.answer = answer
    vars(server.script).update(script)
    whole, streamed = post_all(server, (MESSAGES, ASKED | body), (MESSAGES, ASKED | body | {"stream": True}))
    assert whole.status_code == 200, whole.text
    assert streamed.headers["content-type"].startswith("text/event-stream")
    message = whole.json()
    joined = accumulated(named_events(streamed.text))
    for one in (message, joined):
        assert one.pop("id").startswith("msg_")
        assert all(block.pop("id") for block in one["content"] if block["type"] == "tool_use")
    assert joined == message
    return message, server


def named_events(body: str) -> list[dict[str, Any]]:
    """Each has its type as its name, too."""
    found = []
    for part in parts(body):
        name, data = part.split("\n")
        found.append(json.loads(data.removeprefix("data: ")))
        assert name == f"event: {found[-1]['type']}"
    return found


def accumulated(events: list[dict[str, Any]]) -> dict[str, Any]:
    """The message that the events of a stream make, which come in Anthropic's order."""
    kinds = [event["type"] for event in events]
    assert kinds[:2] == ["message_start", "ping"] and kinds[-2:] == ["message_delta", "message_stop"], kinds
    assert kinds.count("message_start") == kinds.count("message_delta") == 1
    message = events[0]["message"]
    assert message["content"] == [] and message["stop_reason"] is None
    opened = -1
    for event in events[2:-2]:
        if event["type"] == "content_block_start":
            assert opened == -1 and event["index"] == len(message["content"])
            opened, text = event["index"], ""
            message["content"].append(event["content_block"])
            continue
        assert event["index"] == opened
        block = message["content"][-1]
        if event["type"] == "content_block_stop":
            opened = -1
            if text:
                block["input"] = json.loads(text)
            continue
        delta = event["delta"]
        kind = delta.pop("type")
        ((name, value),) = delta.items()
        if kind == "input_json_delta":
            text += value
        elif kind == "signature_delta":
            assert block["type"] == "thinking"
        else:
            assert kind == f"{block['type']}_delta" and value
            block[name] += value
    assert opened == -1
    message.update(events[-2]["delta"])
    return {**message, "usage": events[-2]["usage"]}


def uses(message: dict[str, Any]) -> list[tuple[str, Any]]:
    return [(block["name"], block["input"]) for block in message["content"] if block["type"] == "tool_use"]


def test_an_answer_is_a_message_of_anthropics(model: Path) -> None:
    message, server = ask(model, ANSWER, {"system": "Be kind."})
    assert message == {
        "type": "message",
        "role": "assistant",
        "model": "tiny",
        "content": [{"type": "text", "text": ANSWER, "citations": None}],
        "stop_reason": "end_turn",
        "stop_sequence": None,
        "stop_details": None,
        "container": None,
        "usage": {
            "input_tokens": len(server.core.added[0].prompt_token_ids),
            "output_tokens": len(ANSWER.encode()) + 1,
            **NOTHING_READ,
        },
    }
    assert prompt_of(server) == "<|system|>Be kind.<|user|>hi<|assistant|>"


def test_input_tokens_do_not_count_what_the_cache_had(model: Path) -> None:
    message, server = ask(model, "x", {}, cached_tokens=5)
    usage, prompt = message["usage"], len(server.core.added[0].prompt_token_ids)
    assert (usage["input_tokens"], usage["cache_read_input_tokens"]) == (prompt - 5, 5)


def test_why_an_answer_ended(model: Path) -> None:
    def ended(body: dict[str, Any], answer: str = "a stop b") -> tuple[str, str | None, str]:
        message, _ = ask(model, answer, body)
        return message["stop_reason"], message["stop_sequence"], message["content"][0]["text"]

    assert ended({}) == ("end_turn", None, "a stop b")
    assert ended({"max_tokens": 3}) == ("max_tokens", None, "a s")
    assert ended({"stop_sequences": ["x", " stop"]}) == ("stop_sequence", " stop", "a")
    empty, _ = ask(model, "", {})
    assert empty["content"] == [] and empty["stop_reason"] == "end_turn"


def test_thinking_text_and_calls_are_blocks_in_their_order(model: Path) -> None:
    message, server = ask(model, f"<think>hm</think>Sure.\n{CALL}\n{OTHER}", {"tools": [ADD, NOW]})
    first, second, third, fourth = message["content"]
    assert first == {"type": "thinking", "thinking": "hm", "signature": ""}
    assert second == {"type": "text", "text": "Sure.", "citations": None}
    assert third == {"type": "tool_use", "name": "add", "input": {"a": 1, "b": "zwei"}, "caller": {"type": "direct"}}
    assert (fourth["name"], fourth["input"]) == ("now", {})
    assert message["stop_reason"] == "tool_use"
    shown = prompt_of(server)
    assert shown.startswith("TOOLS") and json.loads(shown[5 : shown.index("<|user|>")]) == [
        {"type": "function", "function": {"name": "add", "description": "adds", "parameters": SCHEMA}},
        {"type": "function", "function": {"name": "now", "parameters": {"type": "object"}}},
    ]


def test_inputs_of_calls_are_json_whatever_numbers_they_hold(model: Path) -> None:
    given = f'{{"a": {10**30}, "b": NaN, "c": "ü"}}'
    message, _ = ask(model, CALL.replace('{"a": 1, "b": "zwei"}', given), {"tools": [ADD]})
    assert uses(message) == [("add", {"a": 10**30, "b": None, "c": "ü"})]


def test_what_is_asked_of_calls_becomes_a_grammar(model: Path) -> None:
    tools = {"tools": [ADD, NOW]}
    for more, names in (
        ({"tool_choice": {"type": "any"}}, {"add", "now"}),
        ({"tool_choice": {"type": "tool", "name": "now"}}, {"now"}),
        ({"tool_choice": {"type": "auto", "disable_parallel_tool_use": True}}, {"add", "now"}),
        ({"tools": [{**ADD, "strict": True}, NOW]}, {"add", "now"}),
        ({"tool_choice": {"type": "auto"}}, set()),
        ({"tool_choice": {"type": "none"}}, set()),
    ):
        message, server = ask(model, OTHER, tools | more)
        grammar = server.core.added[0].grammar or ""
        assert {name for name in ("add", "now") if f'\\"{name}' in grammar or f"{name}\\" in grammar} == names, more
        assert bool(uses(message)) == (more != {"tool_choice": {"type": "none"}})


def test_at_most_one_call_where_parallel_ones_are_disabled(model: Path) -> None:
    choice = {"type": "auto", "disable_parallel_tool_use": True}
    message, _ = ask(model, CALL + OTHER, {"tools": [ADD, NOW], "tool_choice": choice})
    assert uses(message) == [("add", {"a": 1, "b": "zwei"})]


@pytest.mark.parametrize(
    ("body", "shown"),
    [
        ({"thinking": {"type": "enabled", "budget_tokens": 1024}}, "<think>"),
        ({"thinking": {"type": "adaptive"}}, "<think>"),
        ({"thinking": {"type": "disabled"}}, "<think></think>"),
        ({"output_config": {"effort": "high"}}, "<think>"),
        ({"output_config": {"effort": "high"}, "thinking": {"type": "disabled"}}, "<think></think>"),
        ({"chat_template_kwargs": {"enable_thinking": False}}, "<think></think>"),
        ({}, ""),
    ],
)
def test_thinking_is_switched_in_the_template(model: Path, body: dict[str, Any], shown: str) -> None:
    _, server = ask(model, "x</think>y", body)
    assert prompt_of(server).endswith(f"<|assistant|>{shown}")


def test_thinking_may_be_kept_back(model: Path) -> None:
    message, _ = ask(model, "hm</think>Yes.", {"thinking": {"type": "adaptive", "display": "omitted"}})
    assert message["content"] == [
        {"type": "thinking", "thinking": "", "signature": ""},
        {"type": "text", "text": "Yes.", "citations": None},
    ]


@pytest.mark.parametrize("field", ["output_config", "output_format"])
def test_answers_of_a_format_are_held_to_its_schema(model: Path, field: str) -> None:
    form = {"type": "json_schema", "schema": SCHEMA}
    _, server = ask(model, "{}", {field: {"format": form} if field == "output_config" else form})
    assert '"a"' in (server.core.added[0].grammar or "")


def test_the_prompt_is_counted_with_its_tools_and_not_computed(model: Path) -> None:
    server = Server(model)
    body = {"messages": ASKED["messages"], "tools": [ADD], "system": [{"type": "text", "text": "s"}], "model": "tiny"}
    counted, made = post_all(server, (COUNT, body), (MESSAGES, ASKED | body))
    assert counted.status_code == 200 and set(counted.json()) == {"input_tokens"}
    (added,) = server.core.added
    assert counted.json()["input_tokens"] == len(added.prompt_token_ids) == made.json()["usage"]["input_tokens"]


def test_more_than_the_context_holds_can_be_counted(tiny_server_model: Path) -> None:
    long = {"messages": [{"role": "user", "content": "x" * 300}]}
    counted, refused = post_all(Server(tiny_server_model), (COUNT, long), (MESSAGES, ASKED | long))
    assert counted.json()["input_tokens"] > 300
    assert refused.status_code == 400 and error_of(refused)["message"].startswith("prompt is too long: ")


def test_what_claude_code_sends_is_taken(model: Path, caplog: pytest.LogCaptureFixture) -> None:
    body = {
        "metadata": {"user_id": "u"},
        "context_management": {"edits": []},
        "cache_control": {"type": "ephemeral"},
        "service_tier": "auto",
        "tools": [SEARCH, {**ADD, "cache_control": {"type": "ephemeral"}, "eager_input_streaming": True}],
        "container": "c",
    }
    headers = {"anthropic-version": "2023-06-01", "anthropic-beta": "a,b"}

    async def go() -> httpx.Response:
        async with Server(model).client() as client:
            return await client.post(f"{MESSAGES}?beta=true", json=ASKED | body, headers=headers)

    with caplog.at_level("INFO", logger="pageloom.server"):
        reply = asyncio.run(go())
    assert reply.status_code == 200, reply.text
    assert reply.headers["x-pageloom-ignored"] == "container, tools.web_search_20250305"
    assert sum("ignored" in line for line in caplog.messages) == 1
    assert reply.headers["request-id"] == reply.headers["x-request-id"]


def error_of(reply: httpx.Response) -> dict[str, Any]:
    body = reply.json()
    assert set(body) == {"type", "error", "request_id"} and body["type"] == "error", body
    assert body["request_id"] == reply.headers["request-id"] == reply.headers["x-request-id"]
    assert set(body["error"]) == {"type", "message"} and body["error"]["message"]
    return dict(body["error"])


@pytest.mark.parametrize(
    ("body", "says"),
    [
        ({"max_tokens": None}, "max_tokens"),
        ({"max_tokens": 0}, "max_tokens must be"),
        ({"output_config": {"effort": "ultra"}}, "output_config.effort"),
        ({"messages": []}, "messages"),
        ({"messages": "hi"}, "messages"),
        ({"system": 5}, "system"),
        ({"stop_sequences": [""]}, "stop_sequences must not contain"),
        ({"stop_sequences": ["a"] * 65}, "stop_sequences: at most 64"),
        ({"temperature": -1}, "temperature"),
        ({"thinking": {"type": "sometimes"}}, "thinking.type"),
        ({"tools": [{"name": "f"}]}, "tools[0].input_schema"),
        ({"tools": [{"name": "a b", "input_schema": {}}]}, "tools[0].name"),
        ({"tools": [ADD, ADD]}, "two of the name 'add'"),
        ({"tool_choice": {"type": "any"}}, "tool_choice is any, but there are no tools"),
        ({"tools": [SEARCH], "tool_choice": {"type": "tool", "name": "web_search"}}, "none of the tools"),
        ({"tool_choice": {"type": "required"}}, "tool_choice.type"),
        ({"output_format": {"type": "xml"}}, "output_format must be"),
        ({"output_config": {"format": {"type": "json_schema", "schema": {"type": "no"}}}}, "output_config.format"),
    ],
)
def test_what_is_wrong_is_said_in_anthropics_shape(model: Path, body: dict[str, Any], says: str) -> None:
    for stream in (False, True):
        (reply,) = post_all(Server(model), (MESSAGES, ASKED | body | {"stream": stream}))
        error = error_of(reply)
        assert (reply.status_code, error["type"]) == (400, "invalid_request_error") and says in error["message"], error


def test_keys_models_paths_and_sizes_fail_in_anthropics_shape(model: Path) -> None:
    server = Server(model, api_key="secret")

    async def go() -> list[tuple[httpx.Response, int, str]]:
        async with server.client() as client:
            key = {"x-api-key": "secret"}
            wrong = {"x-api-key": "wrong"}
            big = b'{"a": "' + b"x" * 33 * 1024 * 1024 + b'"}'
            return [
                (await client.post(MESSAGES, json=ASKED), 401, "authentication_error"),
                (await client.post(MESSAGES, json=ASKED, headers=wrong), 401, "authentication_error"),
                (await client.post(MESSAGES, json={**ASKED, "model": "other"}, headers=key), 404, "not_found_error"),
                (await client.post(COUNT, json={**ASKED, "model": "other"}, headers=key), 404, "not_found_error"),
                (await client.get(f"{MESSAGES}/batches", headers=key), 404, "not_found_error"),
                (await client.get(MESSAGES, headers=key), 405, "invalid_request_error"),
                (await client.post(MESSAGES, content=b"{", headers=key), 400, "invalid_request_error"),
                (await client.post(MESSAGES, content=big, headers=key), 413, "request_too_large"),
            ]

    for reply, status, kind in asyncio.run(go()):
        assert (reply.status_code, error_of(reply)["type"]) == (status, kind), reply.text


def test_either_header_holds_the_key_on_every_route(model: Path) -> None:
    server = Server(model, api_key="secret")

    async def go() -> None:
        async with server.client() as client:
            for headers, status in (
                ([("x-api-key", "secret")], 200),
                ([("x-api-key", "wrong"), ("Authorization", "Bearer secret")], 200),
                ([("x-api-key", "secret"), ("Authorization", "Bearer wrong")], 200),
                ([("x-api-key", "wrong"), ("Authorization", "Bearer wrong")], 401),
                ([("x-api-key", "secret"), ("x-api-key", "secret")], 401),
                ([("x-api-key", "Bearer secret")], 401),
                ([("x-api-key", "")], 401),
            ):
                assert (await client.get("/v1/models", headers=headers)).status_code == status, headers
                assert (await client.post(MESSAGES, json=ASKED, headers=headers)).status_code == status, headers

    asyncio.run(go())


@pytest.mark.parametrize("stream", [False, True])
def test_a_full_queue_is_overload_and_a_fault_an_api_error(model: Path, stream: bool) -> None:
    for refused, status, kind in (("queue_full", 529, "overloaded_error"), ("fault", 500, "api_error")):
        server = Server(model)
        server.script.refuse = (refused, "because")
        (reply,) = post_all(server, (MESSAGES, ASKED | {"stream": stream}))
        assert (reply.status_code, error_of(reply)["type"]) == (status, kind)
        assert ("retry-after" in reply.headers) == (status == 529)


def test_a_stream_that_fails_ends_with_an_error_event(model: Path) -> None:
    server = Server(model)
    server.script.die_at = 3
    (reply,) = post_all(server, (MESSAGES, ASKED | {"stream": True}))
    *_, final = named_events(reply.text)
    assert reply.status_code == 200 and final["type"] == "error" and final["error"]["type"] == "api_error"
    assert final["request_id"] == reply.headers["x-request-id"]


def test_the_document_says_what_is_sent(model: Path) -> None:
    server = Server(model)
    server.answer = f"<think>a</think>b{CALL}"

    async def go() -> list[httpx.Response]:
        async with server.client() as client:
            bodies = [ASKED | {"tools": [ADD], "stream": stream} for stream in (False, True)]
            replies = [await client.post(MESSAGES, json=body) for body in (*bodies, {})]
            return [*replies, await client.post(COUNT, json=ASKED), await client.get("/openapi.json")]

    whole, streamed, refused, counted, described = asyncio.run(go())
    document = described.json()
    answers, counts = (document["paths"][path]["post"]["responses"] for path in (MESSAGES, COUNT))
    assert "529" in answers and "503" not in answers

    def check(content: dict[str, Any], value: Any, kind: str = "application/json") -> None:
        schema = {**content["content"][kind]["schema"], "components": document["components"]}
        jsonschema.Draft202012Validator(schema).validate(value)

    check(answers["200"], whole.json())
    check(answers["400"], refused.json())
    check(counts["200"], counted.json())
    for event in named_events(streamed.text):
        check(answers["200"], event, "text/event-stream")
