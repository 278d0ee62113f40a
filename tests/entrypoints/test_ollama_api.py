"""Ollama's API over HTTP, as Ollama's own client reads it: its types, its streams, its errors."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Awaitable, Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import httpx
import ollama
import pytest
from pydantic import BaseModel
from scripted_server import ANSWER, Server, post_all, save_model
from test_tools import ADD, CALL, NOW, OTHER, TEMPLATE, prompt_of

from entrypoints.server.ollama_api.models import _files_of

CHAT, GENERATE = "/api/chat", "/api/generate"
HI = [{"role": "user", "content": "hi"}]
SCHEMA = {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_model(tmp_path_factory.mktemp("ollama") / "tiny", template=TEMPLATE, context=4096)


def with_sdk(server: Server, scenario: Callable[[ollama.AsyncClient], Awaitable[None]]) -> None:
    """Ollama's client asks the application in this process."""

    async def go() -> None:
        async with server.client() as client:
            await scenario(ollama.AsyncClient(host="http://scripted", transport=client._transport))

    asyncio.run(asyncio.wait_for(go(), 60))


def known(reply: BaseModel) -> dict[str, Any]:
    """It holds no field, at any depth, that Ollama's types do not know, and those of the right type only."""
    told = reply.model_dump(exclude_unset=True)
    type(reply).model_validate(told)
    return told


def ask(model: Path, answer: str, path: str = CHAT, **body: Any) -> tuple[dict[str, Any], Server]:
    """The whole answer, after it was found to be the same when streamed."""
    server = Server(model)
    server.answer = answer
    asked = {"model": "tiny", **({"messages": HI} if path == CHAT else {"prompt": "hi"}), **body}
    whole, streamed = post_all(server, (path, asked | {"stream": False}), (path, asked))
    assert whole.status_code == 200, whole.text
    assert streamed.headers["content-type"] == "application/x-ndjson"
    *parts, end = [json.loads(line) for line in streamed.text.splitlines()]
    assert end["done"] and not any(part["done"] for part in parts)
    reply = whole.json()
    measured = {"created_at", "total_duration", "eval_duration", "prompt_eval_duration"}
    assert all(end[name] and reply[name] for name in measured)
    for one in (reply, end):
        for name in measured:
            del one[name]
    joined = {**end, **texts_of([*parts, end], path)}
    if logprobs := [one for part in [*parts, end] for one in part.get("logprobs", ())]:
        joined["logprobs"] = logprobs
    for one in (reply, joined):
        assert all(call.pop("id") for call in one.get("message", {}).get("tool_calls", ()))
    assert joined == reply
    return reply, server


def texts_of(parts: list[dict[str, Any]], path: str) -> dict[str, Any]:
    """What a client makes of all parts."""
    spoken = [part["message"] if path == CHAT else part for part in parts]
    content = "".join(each["content" if path == CHAT else "response"] for each in spoken)
    found: dict[str, Any] = {}
    if thinking := "".join(each.get("thinking", "") for each in spoken):
        found["thinking"] = thinking
    if path != CHAT:
        return {**found, "response": content}
    if calls := [call for each in spoken for call in each.get("tool_calls", ())]:
        found["tool_calls"] = calls
    return {"message": {"role": "assistant", "content": content, **found}}


def test_the_client_reads_chats_and_prompts_whole_and_streamed(model: Path) -> None:
    server = Server(model)

    async def scenario(client: ollama.AsyncClient) -> None:
        chat = await client.chat("tiny", messages=HI, options={"num_predict": 400})
        assert (chat.message.content, chat.message.role, chat.done, chat.done_reason) == (
            ANSWER,
            "assistant",
            True,
            "stop",
        )
        counted = chat.prompt_eval_count, chat.eval_count
        assert counted == (len(server.core.added[0].prompt_token_ids), len(ANSWER.encode()) + 1)
        assert chat.eval_duration and chat.prompt_eval_duration and chat.load_duration == 0
        assert chat.total_duration >= chat.eval_duration + chat.prompt_eval_duration
        assert set(known(chat)) == set(ollama.ChatResponse.model_fields) - {"logprobs"}
        parts = [part async for part in await client.chat("tiny:latest", messages=HI, stream=True)]
        assert "".join(part.message.content or "" for part in parts) == ANSWER and len(parts) >= 2
        assert [part.done for part in parts] == [False] * (len(parts) - 1) + [True]
        assert parts[-1].eval_count == chat.eval_count and {part.model for part in parts} == {"tiny:latest"}
        whole = await client.generate("tiny", "hi")
        assert whole.response == ANSWER and whole.done_reason == "stop" and known(whole)
        pieces = [part async for part in await client.generate("tiny", "hi", stream=True)]
        assert "".join(part.response or "" for part in pieces) == ANSWER
        assert pieces[-1].context == whole.context and whole.context is not None

    with_sdk(server, scenario)
    assert {prompt_of(server)} == {"<|user|>hi<|assistant|>"}


def test_the_client_reads_what_is_told_of_the_model(model: Path) -> None:
    server = Server(model)

    async def scenario(client: ollama.AsyncClient) -> None:
        (listed,), (running,) = (await client.list()).models, (await client.ps()).models
        shown = await client.show("tiny")
        assert listed.model == running.model == running.name == "tiny:latest"
        assert listed.digest == running.digest and listed.digest is not None and len(bytes.fromhex(listed.digest)) == 32
        assert listed.modified_at == shown.modified_at and running.expires_at is not None
        assert running.expires_at.year == 9999 and running.context_length == 4096 and running.size_vram == 0
        assert shown.details == listed.details == running.details and shown.details is not None
        details = shown.details
        assert (details.family, details.format, details.quantization_level) == ("llama", "safetensors", "F32")
        assert shown.modelinfo is not None and shown.modelinfo["llama.context_length"] == 4096
        assert shown.modelinfo["general.architecture"] == "llama" and shown.template == TEMPLATE
        assert shown.modelinfo["general.parameter_count"] == 2 * 64 * (12 * 16 + 3 * 128) + 300 * 64
        assert shown.capabilities == ["completion", "tools", "thinking"]

    with_sdk(server, scenario)


def test_tools_of_the_clients_own_making_are_called(model: Path) -> None:
    def add(a: int, b: str) -> str:
        """Adds.

        Args:
          a: one
          b: other
        """
        return b * a

    server = Server(model)
    server.answer = f"<think>hm</think>Sure.\n{CALL}\n{OTHER}"

    async def scenario(client: ollama.AsyncClient) -> None:
        reply = await client.chat("tiny", messages=HI, tools=[add, NOW])
        assert (reply.message.thinking, reply.message.content) == ("hm", "Sure.")
        first, second = reply.message.tool_calls or ()
        assert (first.function.name, first.function.arguments) == ("add", {"a": 1, "b": "zwei"})
        assert (second.function.name, second.function.arguments) == ("now", {})
        results = [{"role": "tool", "tool_name": "add", "content": "zwei"}]
        again = await client.chat("tiny", messages=[*HI, reply.message, *results], tools=[add, NOW])
        assert again.done_reason == "stop"

    with_sdk(server, scenario)
    shown = server.engine.tokenizer.decode(server.core.added[-1].prompt_token_ids)
    assert '"description": "Adds.' in shown and shown.endswith("zwei[add]<|assistant|>")
    assert "<|assistant|><think>hm</think>Sure.<tool_call>" in shown


def test_thinking_and_calls_stand_by_themselves(model: Path) -> None:
    reply, _ = ask(model, f"<think>hm</think>Sure.\n{CALL}\n{OTHER}", tools=[ADD, NOW])
    calls = reply["message"]["tool_calls"]
    assert [call["function"]["index"] for call in calls] == [0, 1]
    assert calls[0]["function"]["arguments"] == {"a": 1, "b": "zwei"}
    assert reply["done_reason"] == "stop" and reply["message"]["thinking"] == "hm"
    prompt, _ = ask(model, "<think>hm</think>Sure.", GENERATE)
    assert (prompt["thinking"], prompt["response"]) == ("hm", "Sure.")


@pytest.mark.parametrize(
    ("think", "shown", "thinking"),
    [
        (None, "", "hm"),
        (True, "<think>", "hm"),
        ("low", "<think>", "hm"),
        ("max", "<think>", "hm"),
        (False, "<think></think>", None),
    ],
)
@pytest.mark.parametrize("path", [CHAT, GENERATE])
def test_thinking_is_switched(model: Path, path: str, think: Any, shown: str, thinking: str | None) -> None:
    reply, server = ask(model, "hm</think>y" if shown == "<think>" else "<think>hm</think>y", path, think=think)
    spoken = reply["message"] if path == CHAT else reply
    assert prompt_of(server).endswith(f"<|assistant|>{shown}")
    assert spoken.get("thinking") == thinking
    assert spoken["content" if path == CHAT else "response"] == "y"


def test_models_that_do_not_think_say_so(tiny_server_model: Path) -> None:
    asked = {"messages": HI}
    refused, quiet = post_all(
        Server(tiny_server_model), (CHAT, {**asked, "think": True}), (CHAT, {**asked, "think": False})
    )
    assert refused.status_code == 400 and "does not support thinking" in refused.json()["error"]
    assert quiet.status_code == 200


def test_options_are_sampling_parameters(model: Path) -> None:
    options = {
        "temperature": 0.5,
        "top_k": 7,
        "top_p": 0.6,
        "min_p": 0.1,
        "repeat_penalty": 1.3,
        "presence_penalty": 0.4,
        "frequency_penalty": -0.4,
        "seed": 5,
        "num_predict": 9,
        "stop": ["ö"],
    }
    without = {
        "num_ctx": 8192,
        "num_gpu": 99,
        "numa": False,
        "mirostat": 0,
        "typical_p": 1.0,
        "tfs_z": 1,
        "num_keep": 4,
    }
    reply, server = ask(model, "abö", options=options | without, keep_alive="5m", truncate=True, shift=True)
    params, most = server.core.added[0].params, server.core.added[0].max_tokens
    assert (reply["message"]["content"], reply["done_reason"], most) == ("ab", "stop", 9)
    assert (params.temperature, params.top_k, params.top_p, params.min_p, params.seed) == (0.5, 7, 0.6, 0.1, 5)
    assert (params.repetition_penalty, params.presence_penalty, params.frequency_penalty) == (1.3, 0.4, -0.4)
    _, server = ask(model, "a", options={**options, "repeat_last_n": 0, "top_k": -1, "seed": -1, "num_predict": -1})
    params = server.core.added[0].params
    assert (params.repetition_penalty, params.presence_penalty, params.frequency_penalty) == (1.0, 0.0, 0.0)
    assert params.top_k == 0 and server.core.added[0].max_tokens > 200 and params.seed != -1


def test_where_nothing_is_said_what_the_authors_recommend_holds(tmp_path: Path) -> None:
    model = save_model(tmp_path / "tiny", generation={"temperature": 0.3, "top_k": 9, "max_new_tokens": 4})
    for options, most in (({}, 4), ({"num_predict": -1}, None), ({"num_predict": -2}, None), ({"num_predict": 3}, 3)):
        _, server = ask(model, "abcdefgh", options=options)
        added = server.core.added[0]
        assert (added.params.temperature, added.params.top_k) == (0.3, 9)
        assert added.max_tokens == (256 - len(added.prompt_token_ids) if most is None else most)


def test_answers_of_a_format(model: Path) -> None:
    server = Server(model)
    server.answer = '{"a": 1}'
    formats = ("json", SCHEMA, {}, "", None)
    asked: list[tuple[str, dict[str, Any]]] = [(CHAT, {"messages": HI, "format": given}) for given in formats]
    asked += [(GENERATE, {"prompt": "x", "format": given}) for given in formats]
    asked.append((CHAT, {"messages": HI, "stream": False, "format": {**SCHEMA, "minProperties": 2}}))
    *_, wrong = post_all(server, *asked)
    assert [bool(added.grammar) for added in server.core.added] == [True, True, True, False, False] * 2 + [True]
    assert "properties" in wrong.json()["schema_error"]


def test_logprobs(model: Path) -> None:
    for path in (CHAT, GENERATE):
        reply, _ = ask(model, "<think>a</think>xy", path, logprobs=True, top_logprobs=2)
        shown = reply["logprobs"]
        assert "".join(one["token"] for one in shown).startswith("<think>a</think>xy")
        assert all(len(one["top_logprobs"]) == 2 and one["logprob"] < 0 for one in shown)
        parsed = [ollama._types.Logprob.model_validate(one) for one in shown]
        assert len(parsed) == reply["eval_count"]


def test_prompts_are_a_users_words_or_all_that_there_is(model: Path, tmp_path: Path) -> None:
    _, server = ask(model, "x", GENERATE, system="Be kind.")
    assert prompt_of(server) == "<|system|>Be kind.<|user|>hi<|assistant|>"
    raw, server = ask(model, "<think>x</think>", GENERATE, raw=True, format="json")
    assert prompt_of(server).endswith("hi") and raw["response"] == "<think>x</think>" and "context" not in raw
    assert server.core.added[0].prompt_token_ids[0] == server.engine.model.bos_token_id
    assert server.core.added[0].grammar
    plain = save_model(tmp_path / "tiny", template="", context=4096)
    _, server = ask(plain, "x", GENERATE)
    assert prompt_of(server).endswith("hi") and "user" not in prompt_of(server)


def test_a_context_is_gone_on_with_and_begins_once(tmp_path: Path) -> None:
    bos = save_model(tmp_path / "tiny", template="<s>{% for m in messages %}[{{ m.content }}]{% endfor %}")
    first, server = ask(bos, "ok", GENERATE)
    added = server.core.added[0].prompt_token_ids
    assert first["context"] == [*added, *server.ids("ok"), server.script.eos]
    _, server = ask(bos, "ok", GENERATE, context=first["context"], prompt="more")
    again = server.core.added[0].prompt_token_ids
    assert again == [*first["context"], *server.ids("[more]")]
    assert again.count(server.engine.model.bos_token_id) == 1


def test_a_gap_is_filled(tmp_path: Path) -> None:
    marks = ("<fim_prefix>", "<fim_suffix>", "<fim_middle>")
    model = save_model(tmp_path / "tiny", special=marks)
    reply, server = ask(model, "mid", GENERATE, prompt="a", suffix="b")
    assert reply["response"] == "mid" and prompt_of(server) == "<s><fim_prefix>a<fim_suffix>b<fim_middle>"
    shown, refused = post_all(
        Server(model), ("/api/show", {"name": "tiny"}), (GENERATE, {"prompt": "a", "suffix": "b", "system": "c"})
    )
    assert "insert" in shown.json()["capabilities"] and refused.status_code == 400


@pytest.mark.parametrize("body", [{}, {"keep_alive": 0}, {"keep_alive": "10m", "stream": False}, {"options": {}}])
def test_who_asks_nothing_learns_that_the_model_is_loaded(model: Path, body: dict[str, Any]) -> None:
    server = Server(model)
    asked = [(CHAT, {"messages": [], **body}), (CHAT, body), (GENERATE, body), (GENERATE, {"prompt": "", **body})]
    for reply in post_all(server, *asked):
        told = reply.json()
        assert (told["done"], told["done_reason"], told["model"]) == (True, "load", "tiny")
    assert not server.core.added


def test_an_assistants_last_words_are_gone_on_with(model: Path) -> None:
    _, server = ask(model, "x", messages=[*HI, {"role": "Assistant", "content": "Well"}])
    assert prompt_of(server) == "<|user|>hi<|assistant|>Well"


def test_names_are_compared_as_ollama_does(model: Path) -> None:
    names = {"tiny": 200, "TINY": 200, "tiny:latest": 200, "": 200, "tiny:q4": 404, "other": 404, "latest": 404}
    replies = post_all(Server(model), *((CHAT, {"model": name, "messages": HI, "stream": False}) for name in names))
    assert [reply.status_code for reply in replies] == list(names.values())
    assert replies[1].json()["model"] == "TINY" and "not found" in replies[-1].json()["error"]


def test_what_curl_sends_is_read_and_what_a_page_sends_without_leave_is_not(model: Path) -> None:
    body = json.dumps({"prompt": "hi", "stream": False}).encode()
    form = "application/x-www-form-urlencoded"

    async def go() -> list[int]:
        async with Server(model).client() as client:
            sent = [{"content-type": form}, {}, {"content-type": form, "origin": "https://a.example"}]
            sent.append({"content-type": "application/json", "origin": "https://a.example"})
            replies = [await client.post(GENERATE, content=body, headers=headers) for headers in sent]
            ignored = await client.post(GENERATE, content=b'{"frobnicate": 1, "options": {"warp": 9}}')
            assert ignored.headers["x-pageloom-ignored"] == "frobnicate, options.warp"
            assert set(replies[2].json()) == {"error"}
            return [reply.status_code for reply in replies]

    assert asyncio.run(go()) == [200, 200, 403, 200]


def test_the_commands_first_question_is_answered(model: Path) -> None:
    async def go() -> httpx.Response:
        async with Server(model).client() as client:
            return await client.head("/")

    assert asyncio.run(go()).status_code == 200


def test_the_size_is_that_of_the_weights_whichever_files_are_missing(tmp_path: Path) -> None:
    (tmp_path / "a.safetensors").write_bytes(b"x" * 300)
    described = SimpleNamespace(path=str(tmp_path), source="safetensors", quantized=None)
    assert _files_of(described).size == 300  # type: ignore[arg-type]
    (tmp_path / "config.json").write_text("{}")
    assert _files_of(described).size == 300  # type: ignore[arg-type]
