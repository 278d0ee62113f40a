"""`/v1/responses`: items in, items and events out, and what is stored of them."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import Any

import httpx
import pytest
from openai.types.responses import Response, ResponseItem
from pydantic import TypeAdapter
from scripted_server import Server, parts, post_all, save_model

from engine.limits import Limits
from entrypoints.server.context import ServerSettings
from entrypoints.server.responses_api.items import Messages, resolved, sealed

URL = "/v1/responses"
TEMPLATE = (
    "{% if tools %}TOOLS{{ tools | tojson }}{% endif %}"
    "{% for m in messages %}<|{{ m.role }}|>{% if m.reasoning_content %}<think>{{ m.reasoning_content }}</think>"
    "{% endif %}{{ m.content }}{% for c in m.tool_calls or [] %}<tool_call>{{ c.function.name }}"
    "{{ c.function.arguments | tojson }}</tool_call>{% endfor %}{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)
ADD = {
    "type": "function",
    "name": "add",
    "parameters": {"type": "object", "properties": {"a": {"type": "integer"}}},
}
CALL = '<tool_call>\n{"name": "add", "arguments": {"a": 1}}\n</tool_call>'


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_model(tmp_path_factory.mktemp("responses") / "tiny", template=TEMPLATE, context=4096)


def serve(model: Path, answer: str = "Yes.", **settings: Any) -> Server:
    server = Server(model, settings=ServerSettings(**settings))
    server.answer = answer
    return server


def ask(model: Path, answer: str, body: dict[str, Any]) -> tuple[dict[str, Any], list[dict[str, Any]], Server]:
    """The response, found to be the one that the last event tells of; and the events."""
    server = serve(model, answer)
    whole, streamed = post_all(server, *((URL, {"input": "hi", "stream": s} | body) for s in (False, True)))
    assert whole.status_code == 200, whole.text
    told = events(streamed.text)
    assert plain(told[-1]["response"]) == plain(whole.json())
    TypeAdapter(Response).validate_python(whole.json())
    return whole.json(), told, server


def texts(page: dict[str, Any]) -> list[str]:
    """Of messages that are listed, which are OpenAI's."""
    TypeAdapter(list[ResponseItem]).validate_python(page["data"])
    return [part["text"] for item in page["data"] for part in item["content"]]


def events(text: str) -> list[dict[str, Any]]:
    *told, last = parts(text)
    assert last == "data: [DONE]"
    found = []
    for number, part in enumerate(told):
        first, second = part.split("\n")
        event = json.loads(second.removeprefix("data: "))
        assert first == f"event: {event['type']}" and event["sequence_number"] == number
        found.append(event)
    return found


def test_arguments_come_as_they_are_written(model: Path) -> None:
    response, told, _ = ask(model, CALL, {"tools": [ADD]})
    (item,) = response["output"]
    kinds = [event["type"].removeprefix("response.") for event in told]
    first = kinds.index("function_call_arguments.delta")
    assert kinds[first - 1] == "output_item.added" and told[first - 1]["item"]["arguments"] == ""
    deltas = [event["delta"] for event in told if event["type"] == "response.function_call_arguments.delta"]
    assert len(deltas) > 5 and "".join(deltas) == item["arguments"]
    assert kinds[first + len(deltas) :] == ["function_call_arguments.done", "output_item.done", "completed"]
    assert told[first + len(deltas)]["arguments"] == item["arguments"] and item["status"] == "completed"


def plain(response: dict[str, Any]) -> dict[str, Any]:
    """Without what is new each time."""
    output = [{k: v for k, v in item.items() if k not in ("id", "call_id")} for item in response["output"]]
    times = ("id", "created_at", "completed_at")
    return {**{k: v for k, v in response.items() if k not in times}, "output": output}


def prompt_of(server: Server, index: int = 0) -> str:
    return server.engine.tokenizer.decode(server.core.added[index].prompt_token_ids)


def test_an_answer_is_a_message(model: Path) -> None:
    response, told, server = ask(model, "Yes.", {"instructions": "Be kind."})
    (item,) = response["output"]
    assert item["type"] == "message" and item["status"] == response["status"] == "completed"
    assert item["content"] == [{"type": "output_text", "text": "Yes.", "annotations": [], "logprobs": []}]
    assert prompt_of(server) == "<|system|>Be kind.<|user|>hi<|assistant|>"
    assert response["usage"]["output_tokens"] == 5 and response["completed_at"] is not None
    kinds = [event["type"].removeprefix("response.") for event in told]
    assert kinds[:4] == ["created", "in_progress", "output_item.added", "content_part.added"]
    assert kinds[-4:] == ["output_text.done", "content_part.done", "output_item.done", "completed"]
    assert set(kinds[4:-4]) == {"output_text.delta"}
    assert "".join(event["delta"] for event in told if event["type"].endswith("text.delta")) == "Yes."


def test_thinking_and_calls_are_items_of_their_own(model: Path) -> None:
    response, told, server = ask(model, f"<think>so</think>Sure.{CALL}", {"tools": [ADD]})
    assert [item["type"] for item in response["output"]] == ["reasoning", "message", "function_call"]
    thinking, _, call = response["output"]
    assert thinking["content"] == [{"type": "reasoning_text", "text": "so"}] and thinking["summary"] == []
    assert (call["name"], json.loads(call["arguments"]), call["status"]) == ("add", {"a": 1}, "completed")
    assert '"name": "add"' in prompt_of(server)
    assert response["usage"]["output_tokens_details"]["reasoning_tokens"] > 0
    by_item = [event["output_index"] for event in told if event["type"] == "response.output_item.done"]
    assert by_item == [0, 1, 2]
    (arguments,) = [event for event in told if event["type"] == "response.function_call_arguments.done"]
    assert arguments["arguments"] == call["arguments"] and arguments["name"] == "add"


def test_a_response_that_is_cut_off_is_incomplete(model: Path) -> None:
    response, told, _ = ask(model, "Yes.", {"max_output_tokens": 2})
    assert response["status"] == "incomplete" and response["incomplete_details"] == {"reason": "max_output_tokens"}
    assert response["output"][0]["status"] == "incomplete" and told[-1]["type"] == "response.incomplete"


def test_custom_tools_and_namespaces_come_back_as_they_were_given(model: Path) -> None:
    tools = [
        {
            "type": "custom",
            "name": "patch",
            "format": {"type": "grammar", "syntax": "lark", "definition": "start: /a/"},
        },
        {"type": "namespace", "name": "fs", "description": "", "tools": [{"type": "function", "name": "read"}]},
    ]
    text = '<tool_call>{"name": "patch", "arguments": {"input": "aaa"}}</tool_call>'
    response, told, server = ask(model, text + CALL.replace("add", "fs__read"), {"tools": tools})
    custom, member = response["output"]
    assert custom["type"] == "custom_tool_call" and custom["input"] == "aaa"
    assert (member["name"], member["namespace"]) == ("read", "fs")
    assert "start: /a/" in prompt_of(server) and "fs__read" in prompt_of(server)
    assert any(event["type"] == "response.custom_tool_call_input.done" for event in told)


def test_tools_that_only_openai_runs_are_passed_over_and_told_of(model: Path) -> None:
    (reply,) = post_all(serve(model), (URL, {"input": "x", "tools": [{"type": "web_search"}, ADD]}))
    assert reply.status_code == 200 and reply.headers["x-pageloom-ignored"] == "tools[0].web_search"


def test_a_conversation_goes_on_from_what_is_stored(model: Path) -> None:
    async def go() -> list[httpx.Response]:
        async with server.client() as client:
            first = await client.post(URL, json={"input": "one", "tools": [ADD], "instructions": "Be kind."})
            (call,) = first.json()["output"]
            item = {"type": "function_call_output", "call_id": call["call_id"], "output": "2"}
            body = {"input": [item], "previous_response_id": first.json()["id"], "instructions": "Be brief."}
            second = await client.post(URL, json=body)
            third = await client.post(URL, json={"input": "three", "previous_response_id": second.json()["id"]})
            return [first, second, third, await client.get(f"{URL}/{first.json()['id']}")]

    server = serve(model, CALL)
    first, _, _, again = asyncio.run(go())
    assert again.json() == first.json()
    assert (
        prompt_of(server, 1)
        == '<|system|>Be brief.<|user|>one<|assistant|><tool_call>add{"a": 1}</tool_call><|tool|>2<|assistant|>'
    )
    assert prompt_of(server, 2).endswith("<|tool|>2<|assistant|>" + CALL + "<|user|>three<|assistant|>")


def test_what_is_stored_can_be_read_and_deleted(model: Path) -> None:
    async def go() -> None:
        async with server.client() as client:
            name = (
                await client.post(URL, json={"input": [{"role": "user", "content": str(i)} for i in range(5)]})
            ).json()["id"]
            page = (await client.get(f"{URL}/{name}/input_items?limit=2&order=asc")).json()
            assert texts(page) == ["0", "1"] and page["has_more"]
            rest = (await client.get(f"{URL}/{name}/input_items?after={page['last_id']}&order=asc")).json()
            assert texts(rest) == ["2", "3", "4"] and not rest["has_more"]
            newest = (await client.get(f"{URL}/{name}/input_items")).json()
            assert texts(newest) == ["4", "3", "2", "1", "0"]
            assert (await client.get(f"{URL}/{name}/input_items?after=no")).status_code == 400
            assert (await client.delete(f"{URL}/{name}")).json() == {"id": name, "object": "response", "deleted": True}
            gone = await client.get(f"{URL}/{name}")
            assert gone.status_code == 404 and gone.json()["error"]["code"] == "response_not_found"
            missing = await client.post(URL, json={"input": "x", "previous_response_id": name})
            assert missing.status_code == 400 and missing.json()["error"]["code"] == "previous_response_not_found"
            unstored = (await client.post(URL, json={"input": "x", "store": False})).json()
            assert unstored["store"] is False and (await client.get(f"{URL}/{unstored['id']}")).status_code == 404

    server = serve(model)
    asyncio.run(go())


def test_a_stream_that_fails_says_so_in_an_event(model: Path) -> None:
    server = serve(model)
    server.script.die_at = 2
    (reply,) = post_all(server, (URL, {"input": "x", "stream": True}))
    assert reply.status_code == 200
    last = events(reply.text)[-1]
    assert last["type"] == "response.failed" and last["response"]["error"]["code"] == "engine_dead"


def test_thinking_comes_back_sealed_where_that_is_asked_for(model: Path) -> None:
    body = {"include": ["reasoning.encrypted_content"], "store": False}
    response, _, _ = ask(model, "<think>so</think>Sure.", body)
    thinking, message = response["output"]
    del thinking["content"]
    server = serve(model)
    post_all(server, (URL, {"input": [thinking, message, {"role": "user", "content": "go"}]}))
    assert prompt_of(server) == "<|assistant|><think>so</think>Sure.<|user|>go<|assistant|>"


def test_a_format_is_a_grammar(model: Path) -> None:
    schema = {"type": "object", "properties": {"a": {"type": "integer"}}}
    form = {"type": "json_schema", "name": "x", "schema": schema, "strict": True}
    response, _, server = ask(model, "{}", {"text": {"format": form}})
    assert response["text"]["format"] == form and server.core.added[0].grammar
    _, _, server = ask(model, "{}", {"text": {"format": {"type": "text"}}})
    assert server.core.added[0].grammar is None


def test_counting_and_compaction(model: Path) -> None:
    server = serve(model, "Bob asked.")
    items = [{"role": "user", "content": "I am Bob."}, {"role": "assistant", "content": "Hi."}]
    counted, compacted = post_all(
        server, (f"{URL}/input_tokens", {"input": "hi"}), (f"{URL}/compact", {"input": items})
    )
    assert counted.json() == {"object": "response.input_tokens", "input_tokens": len("<|user|>hi<|assistant|>")}
    said, summary = compacted.json()["output"]
    assert said["content"] == "I am Bob." and summary["type"] == "compaction"
    server = serve(model)
    post_all(server, (URL, {"input": [said, summary, {"role": "user", "content": "go"}]}))
    assert (
        prompt_of(server)
        == "<|user|>I am Bob.<|system|>What was said before, in short:\nBob asked.<|user|>go<|assistant|>"
    )


def test_stored_items_can_be_referred_to_again_and_again_and_not_be_replaced(model: Path) -> None:
    async def go() -> None:
        async with server.client() as client:
            await client.post(URL, json={"input": [{"role": "user", "content": "mine", "id": "A"}]})
            other = await client.post(URL, json={"input": [{"role": "user", "content": "other", "id": "A"}]})
            for _ in range(3):
                assert (
                    await client.post(URL, json={"input": [{"type": "item_reference", "id": "A"}]})
                ).status_code == 200
            await client.delete(f"{URL}/{other.json()['id']}")
            assert (await client.post(URL, json={"input": [{"id": "A"}]})).status_code == 200

    server = serve(model)
    asyncio.run(go())
    assert [prompt_of(server, i) for i in range(2, 6)] == ["<|user|>mine<|assistant|>"] * 4


def test_what_cannot_be_stored_is_answered_all_the_same(model: Path, tmp_path: Path) -> None:
    server = serve(model, response_store=tmp_path / "r.db")
    for body in ({"metadata": "abc"}, {"user": 5}, {"max_tool_calls": "x"}, {"prompt_cache_key": [1]}):
        (reply,) = post_all(serve(model), (URL, {"input": "x"} | body))
        assert reply.status_code == 400
    big = {"input": "x", "metadata": {"a": 2**80}}
    made, other = post_all(server, (URL, big), (URL, {"input": "x"}))
    assert made.status_code == other.status_code == 200


@pytest.mark.parametrize(
    ("items", "messages"),
    [
        ([{"type": "message", "role": "developer", "content": "d"}], [{"role": "developer", "content": "d"}]),
        (
            [
                {"type": "reasoning", "summary": [{"type": "summary_text", "text": "s"}]},
                {"type": "function_call", "call_id": "1", "name": "f", "arguments": "{}"},
                {"type": "function_call", "call_id": "2", "name": "g", "arguments": "{}"},
                {"type": "function_call_output", "call_id": "1", "output": [{"type": "input_text", "text": "r"}]},
                {"type": "web_search_call", "id": "ws"},
                {"type": "tool_search_output", "call_id": "ts", "status": "completed", "tools": []},
                {"role": "assistant", "content": "a"},
                {"role": "assistant", "content": "b"},
            ],
            [
                {
                    "role": "assistant",
                    "content": None,
                    "reasoning": "s",
                    "tool_calls": [
                        {"id": "1", "type": "function", "function": {"name": "f", "arguments": "{}"}},
                        {"id": "2", "type": "function", "function": {"name": "g", "arguments": "{}"}},
                    ],
                },
                {"role": "tool", "tool_call_id": "1", "content": [{"type": "input_text", "text": "r"}]},
                {"role": "assistant", "content": "a"},
                {"role": "assistant", "content": "b"},
            ],
        ),
        (
            [
                {"type": "reasoning", "encrypted_content": sealed("t")},
                {"type": "reasoning", "content": []},
                {"id": "known"},
            ],
            [
                {"role": "assistant", "content": None, "reasoning": "t"},
                {"role": "assistant", "content": None, "reasoning": ""},
                {"role": "user", "content": "k"},
            ],
        ),
        (
            [{"type": "custom_tool_call", "call_id": "1", "name": "p", "input": "x"}],
            [
                {
                    "role": "assistant",
                    "content": None,
                    "tool_calls": [
                        {"id": "1", "type": "function", "function": {"name": "p", "arguments": '{"input": "x"}'}}
                    ],
                }
            ],
        ),
    ],
)
def test_items_become_messages(items: list[dict[str, Any]], messages: list[dict[str, Any]]) -> None:
    known = {"known": {"type": "message", "role": "user", "content": "k"}}
    made = Messages({}, Limits())
    made.add(resolved(items, known.get))
    assert made.messages == messages


@pytest.mark.parametrize(
    ("body", "param", "word"),
    [
        ({"input": [{"type": "nothing"}]}, "input", "input[0].type"),
        ({"input": [{"type": "function_call"}]}, "input", "input[0] must have a name"),
        ({"input": [{"type": "item_reference", "id": "no"}]}, "input", "'no'"),
        ({"input": [{"role": "user", "content": [{"type": "input_image"}]}]}, "input", "input_image"),
        ({"input": [{"role": "user", "content": 3}]}, "input", "input[0].content"),
        ({"input": [{"type": "function_call_output", "call_id": "1"}]}, "input", "input[0].output"),
        ({"input": []}, "input", "at least one"),
        ({"input": [{"role": "nobody", "content": "x"}]}, "input", "role must be"),
        ({"reasoning": {"effort": "ultra"}}, "reasoning", "reasoning.effort"),
        ({"tools": [{"type": "namespace"}]}, "tools", "tools[0] must have a name"),
        ({"n": 2}, "n", "n must be 1"),
        ({"kv_transfer_params": {"do_remote_prefill": True}}, "kv_transfer_params", "of completions and chats"),
        ({"background": True, "stream": True}, "background", "stream"),
        ({"background": True, "store": False}, "background", "stored"),
        ({"conversation": "c"}, "conversation", "not supported"),
        ({"top_logprobs": 99}, "top_logprobs", "--max-logprobs"),
        ({"max_output_tokens": 0}, "max_output_tokens", "1"),
        ({"input": "x" * 5000}, "input", "maximum context length"),
    ],
)
def test_what_is_wrong_is_said(model: Path, body: dict[str, Any], param: str, word: str) -> None:
    (reply,) = post_all(serve(model), (URL, {"input": "hi"} | body))
    error = reply.json()["error"]
    assert reply.status_code == 400 and error["param"] == param and word in error["message"], error
