"""Tools and thinking over HTTP: what clients send, what the model is shown, and what comes back, streamed or not."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
from openai.lib.streaming.chat import ChatCompletionStreamState
from openai.types.chat import ChatCompletionChunk
from scripted_server import CHATS, Server, events, post_all, save_model

from engine.frontend.tokenizer import Tokenizer
from entrypoints.server.context import ServerSettings
from entrypoints.server.speech import Speech

TEMPLATE = (
    "{% if tools %}TOOLS{{ tools | tojson }}{% endif %}"
    "{% for m in messages %}<|{{ m.role }}|>{% if m.reasoning_content %}<think>{{ m.reasoning_content }}</think>"
    "{% endif %}{{ m.content }}{% for c in m.tool_calls or [] %}<tool_call>{{ c.function | tojson }}</tool_call>"
    "{% endfor %}{% if m.name %}[{{ m.name }}]{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% if enable_thinking is defined %}<think>"
    "{% if not enable_thinking %}</think>{% endif %}{% endif %}{% endif %}"
)
CALL = '<tool_call>\n{"name": "add", "arguments": {"a": 1, "b": "zwei"}}\n</tool_call>'
OTHER = '<tool_call>\n{"name": "now", "arguments": {}}\n</tool_call>'
ADD = {
    "type": "function",
    "function": {
        "name": "add",
        "description": "adds",
        "parameters": {"type": "object", "properties": {"a": {"type": "integer"}, "b": {"type": "string"}}},
    },
}
NOW = {"type": "function", "function": {"name": "now"}}
CHAT: dict[str, Any] = {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 400}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_model(tmp_path_factory.mktemp("tools") / "tiny", template=TEMPLATE, context=4096)


@pytest.fixture(scope="module")
def plain_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_model(tmp_path_factory.mktemp("tools") / "plain", context=4096)


def ask(model: Path, answer: str, body: dict[str, Any], **settings: Any) -> tuple[dict[str, Any], Server]:
    """The whole reply, after it was found to be the same when streamed."""
    server = Server(model, settings=ServerSettings(**settings))
    server.answer = answer
    whole, streamed = post_all(server, (CHATS, CHAT | body), (CHATS, CHAT | body | {"stream": True}))
    assert whole.status_code == 200, whole.text
    choice = whole.json()["choices"][0]
    assert without_ids(joined(streamed.text)) == without_ids(choice), streamed.text
    return choice, server


def without_ids(choice: dict[str, Any]) -> dict[str, Any]:
    message = choice["message"]
    calls = [{**call, "id": bool(call["id"])} for call in message.get("tool_calls", [])]
    wanted = {key: message.get(key) for key in ("reasoning", "reasoning_content", "function_call")}
    return {"finish_reason": choice["finish_reason"], "content": message.get("content") or "", "calls": calls, **wanted}


def joined(stream: str) -> dict[str, Any]:
    message: dict[str, Any] = {}
    reason = None
    for event in events(stream):
        choice = event["choices"][0]
        reason = choice["finish_reason"] or reason
        for name, value in choice["delta"].items():
            if name == "tool_calls":
                for call in value:
                    calls = message.setdefault("tool_calls", [])
                    if (index := call.pop("index")) < len(calls):
                        assert index == len(calls) - 1 and set(call) == {"function"}
                        calls[index]["function"]["arguments"] += call["function"]["arguments"]
                        continue
                    assert index == len(calls)
                    calls.append(call)
            elif name in ("content", "reasoning", "reasoning_content"):
                message[name] = message.get(name, "") + value
            elif name == "function_call" and name in message:
                message[name]["arguments"] += value["arguments"]
            else:
                message[name] = value
    return {"message": message, "finish_reason": reason}


def prompt_of(server: Server) -> str:
    return server.engine.tokenizer.decode(server.core.added[0].prompt_token_ids, skip_special_tokens=False)


def calls_of(choice: dict[str, Any]) -> list[tuple[str, Any]]:
    calls = choice["message"]["tool_calls"]
    assert all(call["type"] == "function" and call["id"] for call in calls)
    return [(call["function"]["name"], json.loads(call["function"]["arguments"])) for call in calls]


def test_calls_come_as_calls(model: Path) -> None:
    choice, server = ask(model, f"Sure.\n{CALL}\n{OTHER}", {"tools": [ADD, NOW]})
    assert calls_of(choice) == [("add", {"a": 1, "b": "zwei"}), ("now", {})]
    assert choice["message"]["content"] == "Sure." and choice["finish_reason"] == "tool_calls"
    assert '"name": "add"' in prompt_of(server) and server.core.added[0].grammar is None


@pytest.mark.parametrize("choice", ["auto", "required"])
def test_a_call_that_a_limit_cuts_is_the_same_whole_and_streamed_and_shows_no_marks(model: Path, choice: str) -> None:
    for limit in (20, 45, 62, len(CALL) + 4, len(CALL) + 30):
        body = {"tools": [ADD, NOW], "tool_choice": choice, "max_tokens": limit}
        cut, _ = ask(model, f"{CALL}\n{CALL}", body)
        assert cut["finish_reason"] == "length" and not cut["message"]["content"]
        calls = [call["function"] for call in cut["message"].get("tool_calls", [])]
        whole = '{"a": 1, "b": "zwei"}'
        assert [call["name"] for call in calls] == ["add"] * len(calls)
        assert all(whole.startswith(call["arguments"]) for call in calls)
        assert [call["arguments"] for call in calls[:1]] == [whole] or limit <= len(CALL)


def test_content_is_null_beside_calls_alone(model: Path) -> None:
    choice, _ = ask(model, CALL, {"tools": [ADD]})
    assert choice["message"]["content"] is None


def test_without_calls_nothing_changes(model: Path) -> None:
    choice, _ = ask(model, "No <tool needed.", {"tools": [ADD]})
    assert choice["message"] == {
        "role": "assistant",
        "content": "No <tool needed.",
        "refusal": None,
        "annotations": [],
    }
    assert choice["finish_reason"] == "stop"


def test_thinking_comes_under_its_own_name(model: Path) -> None:
    for field in ("reasoning", "reasoning_content", "both"):
        choice, _ = ask(model, "<think>\nso\n</think>\n\nYes.", {}, reasoning_field=field)
        names = ["reasoning", "reasoning_content"] if field == "both" else [field]
        assert [choice["message"].get(name) for name in names] == ["so"] * len(names)
        assert choice["message"]["content"] == "Yes."
    choice, _ = ask(model, "<think>so</think>Yes.", {"include_reasoning": False})
    assert "reasoning" not in choice["message"] and choice["message"]["content"] == "Yes."


def test_thinking_that_the_prompt_has_begun(model: Path) -> None:
    choice, _ = ask(model, f"so</think>{CALL}", {"tools": [ADD], "enable_thinking": True})
    assert choice["message"]["reasoning"] == "so" and calls_of(choice)[0][0] == "add"
    choice, _ = ask(model, f"{CALL}{OTHER}", {"tools": [ADD, NOW], "enable_thinking": False})
    assert len(calls_of(choice)) == 2, "parallel calls with thinking off: </think> stands in the prompt"


@pytest.mark.parametrize(
    ("body", "shown"),
    [
        ({"reasoning_effort": "low"}, "<think>"),
        ({"reasoning_effort": "none"}, "<think></think>"),
        ({"thinking": {"type": "disabled"}}, "<think></think>"),
        ({"thinking": {"type": "enabled"}}, "<think>"),
        ({"chat_template_kwargs": {"enable_thinking": False}, "reasoning_effort": "high"}, "<think></think>"),
        ({}, ""),
    ],
)
def test_clients_ways_to_switch_thinking_are_the_templates(model: Path, body: dict[str, Any], shown: str) -> None:
    _, server = ask(model, "x", body)
    assert prompt_of(server).endswith(f"<|assistant|>{shown}")


def test_thinking_may_have_a_budget(tmp_path: Path, model: Path) -> None:
    thinks = save_model(tmp_path / "m", template=TEMPLATE, special=("</think>",), context=4096)
    _, server = ask(thinks, "so</think>Yes.", {"thinking_token_budget": 7, "enable_thinking": True})
    assert "max_tokens=7" in (grammar_of(server) or "")
    _, server = ask(thinks, "Yes.", {"thinking_token_budget": 0})
    assert prompt_of(server).endswith("<think></think>") and grammar_of(server) is None
    _, server = ask(thinks, "Yes.", {"thinking_token_budget": 9})
    assert "max_tokens=9" in (grammar_of(server) or "")
    (reply,) = post_all(Server(model), (CHATS, CHAT | {"thinking_token_budget": 9}))
    error = reply.json()["error"]
    assert reply.status_code == 400 and "no token '</think>'" in error["message"]


def test_whole_conversations_with_calls_and_thinking_are_rendered(model: Path) -> None:
    arguments = '{"a": 1}'
    call = {"id": "c1", "type": "function", "function": {"name": "add", "arguments": arguments}}
    messages = [
        {"role": "user", "content": "hi"},
        {"role": "assistant", "content": None, "reasoning": "hm", "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "c1", "content": [{"type": "text", "text": "3"}]},
    ]
    _, server = ask(model, "x", {"messages": messages, "tools": [ADD]})
    told = '<|assistant|><think>hm</think><tool_call>{"arguments": {"a": 1}, "name": "add"}</tool_call><|tool|>3[add]'
    assert told in prompt_of(server).replace(
        '{"name": "add", "arguments": {"a": 1}}', '{"arguments": {"a": 1}, "name": "add"}'
    )


def grammar_of(server: Server) -> str | None:
    grammar = server.core.added[0].grammar
    assert all(added.grammar == grammar for added in server.core.added)
    return grammar


def test_what_is_required_becomes_a_grammar(model: Path) -> None:
    for body, names in (
        ({"tool_choice": "required"}, {"add", "now"}),
        ({"tool_choice": {"type": "function", "function": {"name": "now"}}}, {"now"}),
        ({"tool_choice": {"type": "function", "name": "now"}}, {"now"}),
        ({"tool_choice": {"type": "allowed_tools", "allowed_tools": {"mode": "required", "tools": [NOW]}}}, {"now"}),
        ({"tools": [{**ADD, "function": {**ADD["function"], "strict": True}}, NOW]}, {"add", "now"}),
        ({"parallel_tool_calls": False}, {"add", "now"}),
    ):
        _, server = ask(model, OTHER, {"tools": [ADD, NOW], **body})
        grammar = grammar_of(server) or ""
        assert {name for name in ("add", "now") if f'\\"{name}' in grammar or f"{name}\\" in grammar} == names, body


def test_no_calls_are_shown_where_none_are_wanted(model: Path) -> None:
    choice, server = ask(model, CALL, {"tools": [ADD], "tool_choice": "none"})
    assert choice["message"]["content"] == CALL and "TOOLS" not in prompt_of(server)


def test_only_the_first_of_several_calls_where_one_is_allowed(model: Path) -> None:
    choice, _ = ask(model, CALL + OTHER, {"tools": [ADD, NOW], "parallel_tool_calls": False})
    assert [name for name, _ in calls_of(choice)] == ["add"]


def test_legacy_functions(model: Path) -> None:
    body = {"functions": [ADD["function"]], "function_call": "auto"}
    choice, _ = ask(model, CALL, body)
    assert choice["message"]["function_call"]["name"] == "add" and choice["finish_reason"] == "function_call"
    assert "tool_calls" not in choice["message"]
    _, server = ask(model, CALL, {**body, "function_call": {"name": "add"}})
    assert grammar_of(server)


def test_custom_tools_take_text(model: Path) -> None:
    patch = {
        "type": "custom",
        "custom": {
            "name": "patch",
            "format": {"type": "grammar", "grammar": {"syntax": "lark", "definition": "start: /a+/"}},
        },
    }
    answer = '<tool_call>{"name": "patch", "arguments": {"input": "aaa"}}</tool_call>'
    choice, server = ask(model, answer, {"tools": [patch]})
    (call,) = choice["message"]["tool_calls"]
    assert call["type"] == "custom" and call["custom"] == {"name": "patch", "input": "aaa"}
    assert "start: /a+/" in prompt_of(server)


def test_an_answer_in_a_format_or_calls(model: Path) -> None:
    schema = {"type": "json_schema", "json_schema": {"name": "x", "schema": {"type": "object"}, "strict": True}}
    choice, server = ask(model, CALL, {"tools": [ADD], "response_format": schema})
    assert calls_of(choice)[0][0] == "add"
    grammar = json.loads(grammar_of(server) or "")
    assert [each["name"] for each in grammar["grammars"]] == ["output", "json_schema", "alternative"]


def test_models_without_tools_of_their_own_are_told_of_them(plain_model: Path) -> None:
    choice, server = ask(plain_model, f"Sure.\n{CALL}", {"tools": [ADD]})
    assert calls_of(choice)[0] == ("add", {"a": 1, "b": "zwei"})
    prompt = prompt_of(server)
    assert prompt.startswith("<|system|>You may call") and '"description": "adds"' in prompt
    call = {"id": "c1", "type": "function", "function": {"name": "add", "arguments": '{"a": 1}'}}
    messages = [
        {"role": "system", "content": "Be kind."},
        {"role": "user", "content": "hi"},
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "c1", "content": "3"},
    ]
    _, server = ask(plain_model, "x", {"messages": messages})
    prompt = prompt_of(server)
    assert prompt.startswith("<|system|>Be kind.<|user|>hi<|assistant|><tool_call>\n")
    assert "<|user|><tool_response>\n3\n</tool_response>" in prompt


def test_marks_that_are_special_tokens_are_seen_all_the_same(tmp_path: Path) -> None:
    special = ("[TOOL_CALLS]", "[ARGS]")
    template = TEMPLATE.replace("<tool_call>", "[TOOL_CALLS]").replace("</tool_call>", "[ARGS]")
    model = save_model(tmp_path / "m", template=template, special=special, context=4096)
    body = {"tools": [ADD]}
    choice, _ = ask(model, '[TOOL_CALLS]add[ARGS]{"a": 1}', body)
    assert calls_of(choice) == [("add", {"a": 1})]
    _, server = ask(model, '[TOOL_CALLS]add[ARGS]{"a": 1}', {**body, "tool_choice": "required"})
    ids = [server.engine.tokenizer.backend.token_to_id(text) for text in special]
    assert all(f"<[{each}]>" in (grammar_of(server) or "") for each in ids)


@pytest.mark.parametrize(
    ("body", "param", "word"),
    [
        ({"tools": [{"type": "function"}]}, "tools", "tools[0].function must be an object"),
        ({"tools": [{"type": "web_search"}]}, "tools", "tools[0].type must be function or custom"),
        ({"tools": [{"type": "function", "function": {"name": "a b"}}]}, "tools", "tools[0].function.name"),
        ({"tools": [NOW, NOW]}, "tools", "two of the name 'now'"),
        (
            {"tools": [{"type": "function", "function": {"name": "f", "parameters": {"type": "array"}}}]},
            "tools",
            "schema",
        ),
        ({"tools": [NOW], "tool_choice": "never"}, "tool_choice", "auto, none, required"),
        ({"tools": [NOW], "tool_choice": {"type": "function", "function": {"name": "x"}}}, "tool_choice", "'x'"),
        ({"tool_choice": "required"}, "tool_choice", "no tools"),
        ({"tools": [NOW] * 513}, "tools", "512"),
        ({"functions": [{}]}, "functions", "functions[0].function.name"),
        ({"tools": 3}, "tools", "list"),
        ({"tools": [{"type": "custom", "custom": {}}]}, "tools", "name"),
    ],
)
def test_what_is_wrong_with_tools_is_said(model: Path, body: dict[str, Any], param: str, word: str) -> None:
    (reply,) = post_all(Server(model), (CHATS, CHAT | body))
    error = reply.json()["error"]
    assert reply.status_code == 400 and error["param"] == param and word in error["message"], error


def test_where_calls_are_required_a_format_holds_nothing(model: Path) -> None:
    """Some clients send both: what content must be, and that there is none."""
    body = {"tools": [ADD], "tool_choice": "required", "response_format": {"type": "json_object"}}
    choice, server = ask(model, CALL, body)
    assert calls_of(choice) == [("add", {"a": 1, "b": "zwei"})]
    alone = Server(model)
    post_all(alone, (CHATS, CHAT | body | {"response_format": {"type": "text"}}))
    assert grammar_of(server) == grammar_of(alone) is not None


def test_where_calls_are_not_known_tools_are_refused(model: Path) -> None:
    server = Server(model, settings=ServerSettings(tool_call_parser="none"))
    (reply,) = post_all(server, (CHATS, CHAT | {"tools": [NOW]}))
    assert reply.status_code == 400 and "--tool-call-parser" in reply.json()["error"]["message"]


def test_logprobs_of_text_that_was_held_back_come_with_the_next_chunk(model: Path) -> None:
    server = Server(model)
    server.answer = f"a{CALL}"
    body = {"tools": [ADD], "logprobs": True, "stream": True}
    (reply,) = post_all(server, (CHATS, CHAT | body))
    tokens = [
        entry["token"]
        for event in events(reply.text)
        for entry in (event["choices"][0]["logprobs"] or {}).get("content", [])
    ]
    assert "".join(tokens) == server.answer + "</s>"


def test_samples_are_read_each_by_itself(model: Path) -> None:
    server = Server(model)
    server.answer = CALL
    whole, streamed = post_all(server, *((CHATS, CHAT | {"tools": [ADD], "n": 3, "stream": s}) for s in (False, True)))
    assert [len(choice["message"]["tool_calls"]) for choice in whole.json()["choices"]] == [1, 1, 1]
    found = [
        (event["choices"][0]["index"], call["index"], call["function"])
        for event in events(streamed.text)
        for call in event["choices"][0]["delta"].get("tool_calls", [])
    ]
    assert {each[:2] for each in found} == {(0, 0), (1, 0), (2, 0)}
    texts = ["".join(call["arguments"] for index, _, call in found if index == sample) for sample in range(3)]
    assert [json.loads(text) for text in texts] == [{"a": 1, "b": "zwei"}] * 3


def test_arguments_come_as_they_are_written(model: Path) -> None:
    """OpenAI's own client makes the message of the deltas; a custom tool's input comes whole."""
    custom = {"type": "custom", "custom": {"name": "write"}}
    server = Server(model)
    server.answer = CALL + '<tool_call>{"name": "write", "arguments": {"input": "x\\ny"}}</tool_call>'
    (streamed,) = post_all(server, (CHATS, CHAT | {"tools": [ADD, custom], "stream": True}))
    state: ChatCompletionStreamState[None] = ChatCompletionStreamState()
    told = []
    for event in events(streamed.text):
        new = event["choices"][0]["delta"].get("tool_calls", [])
        told += new
        if not any("custom" in call for call in new):  # the client's types know of none in a stream
            state.handle_chunk(ChatCompletionChunk.model_validate(event))
    calls = state.get_final_completion().choices[0].message.tool_calls or []
    function = calls[0].function
    assert (function.name, json.loads(function.arguments)) == ("add", {"a": 1, "b": "zwei"})
    assert told[0]["function"] == {"name": "add", "arguments": ""} and told[0]["id"]
    assert len(told) > 5 and all(set(call) == {"index", "function"} for call in told[1:-1])
    assert told[-1]["custom"] == {"name": "write", "input": "x\ny"} and told[-1]["index"] == 1


@pytest.mark.parametrize(("knows", "name"), [("", "hermes"), ("{{ tools }}", "deepseek_v31")])
def test_who_is_told_of_tools_in_words_is_read_in_the_same_words(knows: str, name: str) -> None:
    """Templates that write calls do not always tell of tools (DeepSeek V3.1's)."""
    template = f"{knows}<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>{{{{ name }}}}<｜tool▁sep｜></think>"
    tokenizer = SimpleNamespace(chat_template_text=lambda _: template, response_template=None, backend=None)
    dialect = Speech(cast(Tokenizer, tokenizer)).dialect
    assert dialect.name == name and dialect.thinking == ("<think>", "</think>")


def test_token_ids_of_a_call_come_though_its_text_is_held_back(model: Path) -> None:
    server = Server(model)
    server.answer = f"I add. {CALL}"
    body = CHAT | {"tools": [ADD], "return_token_ids": True}
    whole, streamed = post_all(server, (CHATS, body), (CHATS, body | {"stream": True}))
    assert whole.json()["choices"][0]["token_ids"] == (ids := [*server.script.answer, server.script.eos])
    assert [i for event in events(streamed.text) for i in event["choices"][0].get("token_ids", [])] == ids
