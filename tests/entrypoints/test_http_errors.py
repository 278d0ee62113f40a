"""Every refusal has OpenAI's four fields, the right status, and the name of the parameter at fault."""

from __future__ import annotations

import asyncio
from typing import Any

import httpx
import pytest
from scripted_server import Server, events

CHAT = {"messages": [{"role": "user", "content": "hi"}]}


def request(server: Server, method: str, path: str, **arguments: Any) -> httpx.Response:
    async def go() -> httpx.Response:
        async with server.client() as client:
            return await client.request(method, path, **arguments)

    return asyncio.run(asyncio.wait_for(go(), 20))


def error_of(reply: httpx.Response) -> dict[str, Any]:
    body = reply.json()
    assert set(body) == {"error"} and set(body["error"]) == {"message", "type", "param", "code"}, body
    assert body["error"]["message"] and body["error"]["type"]
    return dict(body["error"])


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({"temperature": -1}, "temperature"),
        ({"temperature": "warm"}, "temperature"),
        ({"max_tokens": 0}, "max_tokens"),
        ({"n": 0}, "n"),
        ({"top_p": 0}, "top_p"),
        ({"prompt": []}, "prompt"),
        ({"prompt": [[10**9]]}, "prompt"),
        ({"prompt": {"a": 1}}, "prompt"),
        ({"prompt": [5] * 256}, "prompt"),
        ({"logprobs": 21}, "logprobs"),
        ({"logprobs": -1}, "logprobs"),
        ({"truncate_prompt_tokens": 0}, "truncate_prompt_tokens"),
        ({"typical_p": 0.5}, "typical_p"),
        ({"guided_regex": "a+", "grammar": 'root ::= "a"'}, "grammar"),
        ({"structured_outputs": {"regexp": "a+"}}, "structured_outputs"),
        ({"structured_outputs": {"regex": "a", "choice": ["a"]}}, "structured_outputs"),
        ({"guided_json": 5}, "guided_json"),
        ({"json_schema": {"type": "nothing"}}, "json_schema"),
        ({"guided_regex": "(?=a)"}, "guided_regex"),
        ({"best_of": 2, "n": 3}, "best_of"),
        ({"best_of": 3, "stream": True}, "best_of"),
        ({"suffix": "x"}, "suffix"),
        ({"stream_options": {"include_usage": True}}, "stream_options"),
        ({"stream": True, "prompt_logprobs": 1}, "prompt_logprobs"),
        ({"stream": True, "kv_transfer_params": {"do_remote_decode": True}}, "stream"),
        ({"kv_transfer_params": {"nonsense": 1}}, "kv_transfer_params"),
        ({"stream": True, "temperature": -1}, "temperature"),
        ({"stream": True, "prompt": [5] * 256}, "prompt"),
        ({"logit_bias": {"x": 1}}, "logit_bias"),
        ({"stop": ""}, "stop"),
        ({"priority": 3}, "priority"),
        ({"cache_salt": ""}, "cache_salt"),
    ],
)
def test_bad_completions_are_400_and_name_the_field(server: Server, body: dict[str, Any], param: str) -> None:
    reply = request(server, "POST", "/v1/completions", json={"prompt": "x", **body})
    assert reply.status_code == 400
    error = error_of(reply)
    assert (error["param"], error["type"]) == (param, "invalid_request_error"), error
    assert not server.core.running


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({"messages": []}, "messages"),
        ({"messages": [{"content": "no role"}]}, "messages"),
        ({"max_tokens": 0}, "max_tokens"),
        ({"max_completion_tokens": 0}, "max_completion_tokens"),
        ({"top_logprobs": 2}, "top_logprobs"),
        ({"logprobs": True, "top_logprobs": 99}, "top_logprobs"),
        ({"logprobs": True, "top_logprobs": -1}, "top_logprobs"),
        ({"tools": [{"type": "function"}]}, "tools"),
        ({"tool_choice": "required"}, "tool_choice"),
        ({"functions": [{"name": "a f"}]}, "functions"),
        ({"audio": {"voice": "alloy"}}, "audio"),
        ({"response_format": {"type": "xml"}}, "response_format"),
        ({"response_format": {"type": "json_schema"}}, "response_format"),
        ({"response_format": {"type": "json_schema", "json_schema": {"schema": 5}}}, "response_format"),
        ({"response_format": {"type": "json_object"}, "structured_outputs": {"regex": "a"}}, "structured_outputs"),
        (
            {
                "response_format": {
                    "type": "json_schema",
                    "json_schema": {"name": "x", "strict": True, "schema": {"type": "array", "uniqueItems": True}},
                }
            },
            "response_format",
        ),
        ({"messages": [{"role": "robot", "content": "x"}]}, "messages"),
        ({"messages": [{"role": "assistant", "tool_calls": [{"id": "1"}]}]}, "messages"),
        ({"continue_final_message": True}, "continue_final_message"),
    ],
)
def test_bad_chats_are_400_and_name_the_field(server: Server, body: dict[str, Any], param: str) -> None:
    reply = request(server, "POST", "/v1/chat/completions", json={**CHAT, **body})
    assert reply.status_code == 400 and error_of(reply)["param"] == param


@pytest.mark.parametrize(
    ("content", "kind", "says"),
    [
        (b'{"prompt": ', "application/json", "not valid JSON"),
        (b"[1, 2]", "application/json", "JSON object"),
        (b'{"prompt": "x"}', "application/x-www-form-urlencoded", "Content-Type: application/json"),
        (b"", "application/json", "JSON object"),
        (b"{}", "application/json", "prompt"),
    ],
)
def test_a_body_that_is_no_request_is_400_with_the_reason(server: Server, content: bytes, kind: str, says: str) -> None:
    reply = request(server, "POST", "/v1/completions", content=content, headers={"content-type": kind})
    assert reply.status_code == 400 and says in error_of(reply)["message"]


def test_unknown_models_paths_and_methods(server: Server) -> None:
    async def go() -> list[httpx.Response]:
        async with server.client() as client:
            return [
                await client.post("/v1/completions", json={"model": "other", "prompt": "x"}),
                await client.get("/v1/models/other"),
                await client.get("/v1/nothing"),
                await client.get("/v1/completions"),
            ]

    wrong, unlisted, missing, method = asyncio.run(go())
    for reply in (wrong, unlisted):
        assert reply.status_code == 404 and error_of(reply)["code"] == "model_not_found"
        assert error_of(reply)["param"] == "model"
    assert missing.status_code == 404 and error_of(missing)
    assert method.status_code == 405 and error_of(method) and method.headers["allow"] == "POST"


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    ("kind", "status", "code"),
    [
        ("queue_full", 503, "queue_full"),
        ("too_short", 503, "deadline_unreachable"),
        ("fault", 500, "request_failed"),
    ],
)
def test_what_the_core_refuses_before_the_first_token_is_a_status(
    server: Server, stream: bool, kind: str, status: int, code: str
) -> None:
    server.script.refuse = (kind, "because")
    reply = request(server, "POST", "/v1/chat/completions", json={**CHAT, "stream": stream})
    assert (reply.status_code, error_of(reply)["code"]) == (status, code)
    assert ("retry-after" in reply.headers) == (status == 503)


def test_a_core_that_dies_ends_streams_with_an_error_event(server: Server) -> None:
    async def go() -> list[httpx.Response]:
        async with server.client() as client:
            three = await client.post("/v1/completions", json={"prompt": "x", "max_tokens": 3})
            server.script.die_at = 3
            streamed = await client.post("/v1/completions", json={"prompt": "x", "stream": True})
            after = await client.post("/v1/completions", json={"prompt": "x"})
            return [three, streamed, after, await client.get("/health")]

    three, streamed, after, health = asyncio.run(asyncio.wait_for(go(), 20))
    assert streamed.status_code == 200 and "[DONE]" not in streamed.text
    *tokens, error = events(streamed.text + "data: [DONE]\n\n")
    assert "".join(c["text"] for t in tokens for c in t["choices"]) == three.json()["choices"][0]["text"]
    assert error["error"]["code"] == "engine_dead" and set(error["error"]) == {"message", "type", "param", "code"}
    assert after.status_code == 500 and error_of(after)["code"] == "engine_dead"
    assert health.status_code == 503 and error_of(health)["code"] == "engine_dead"
    assert not any("killed by the script" in reply.text for reply in (streamed, after, health)), "that is for the log"
    assert all(reply.headers["x-request-id"] in reply.text for reply in (streamed, after))


def test_an_unexpected_error_is_a_500_that_tells_nothing(server: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(self: object) -> None:
        raise KeyError("secret detail")

    monkeypatch.setattr(type(server.engine), "default_sampling_params", broken)
    reply = request(server, "POST", "/v1/completions", json={"prompt": "x"})
    assert reply.status_code == 500 and "secret" not in reply.text and error_of(reply)["code"] == "internal_error"


def test_tokenize_and_detokenize_are_inverse_and_bounded(server: Server) -> None:
    async def go() -> list[httpx.Response]:
        async with server.client() as client:
            there = await client.post("/tokenize", json={"prompt": "wörld", "return_token_strs": True})
            plain = await client.post("/tokenize", json={"prompt": "wörld", "add_special_tokens": False})
            back = await client.post("/detokenize", json={"tokens": plain.json()["tokens"]})
            chat = await client.post("/tokenize", json={**CHAT, "add_generation_prompt": False})
            bad = [await client.post("/detokenize", json={"tokens": [t]}) for t in (-1, 300, 2**40)]
            both = await client.post("/tokenize", json={**CHAT, "prompt": "x"})
            return [there, plain, back, chat, both, *bad]

    there, plain, back, chat, both, *bad = asyncio.run(go())
    assert there.json()["tokens"][1:] == plain.json()["tokens"] and there.json()["token_strs"][:2] == ["<s>", "w"]
    assert there.json()["count"] == 7 and there.json()["max_model_len"] == 256
    assert back.json() == {"prompt": "wörld"}
    assert chat.json()["tokens"] == server.ids("<|user|>hi")
    assert both.status_code == 400 and error_of(both)
    assert [(r.status_code, error_of(r)["param"]) for r in bad] == [(400, "tokens")] * 3
