"""Anthropic's conversations as models are shown them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st
from scripted_server import Server, post_all, save_model
from test_messages_api import ASKED, COUNT, MESSAGES, error_of
from test_tools import TEMPLATE, prompt_of

from engine.errors import InvalidRequestError
from engine.limits import Limits
from entrypoints.server import messages_turns
from entrypoints.server.messages_turns import begun_answer

USER = {"role": "user", "content": "u"}
BILLING = "x-anthropic-billing-header: cc_version=1.2; cch=af31;"


def chat_of(messages: list[dict[str, Any]], system: str | list[dict[str, Any]] | None) -> list[dict[str, Any]]:
    return messages_turns.chat_of(messages, system, Limits())


def text(*texts: str) -> list[dict[str, Any]]:
    return [{"type": "text", "text": each, "cache_control": {"type": "ephemeral"}} for each in texts]


def call(name: str, **given: Any) -> dict[str, Any]:
    return {"type": "tool_use", "id": f"id_{name}", "name": name, "input": given}


def result(name: str, **fields: Any) -> dict[str, Any]:
    return {"type": "tool_result", "tool_use_id": f"id_{name}", **fields}


def test_the_system_prompt_comes_first_and_is_text_or_blocks() -> None:
    assert chat_of([USER], "s") == chat_of([USER], text("s")) == [{"role": "system", "content": "s"}, USER]
    assert chat_of([USER], text("a", "b"))[0]["content"] == "a\nb"
    assert chat_of([USER], None) == chat_of([USER], "") == [USER]


def test_a_billing_line_that_changes_is_not_part_of_the_prompt() -> None:
    plain = chat_of([USER], text("You are kind."))
    assert chat_of([USER], text(BILLING, "You are kind.")) == plain
    assert chat_of([USER], f"{BILLING}\nYou are kind.") == plain
    assert chat_of([USER], text(BILLING)) == [USER]
    said = [{"role": "user", "content": BILLING}]
    assert chat_of(said, None) == said, "what users say is left as it is"


def test_messages_of_one_role_in_a_row_are_one_turn() -> None:
    messages = [USER, {"role": "user", "content": text("v")}, {"role": "assistant", "content": "a"}, USER]
    assert [m["content"] for m in chat_of(messages, None)] == ["u\nv", "a", "u"]


def test_results_of_tools_are_messages_before_what_the_user_says() -> None:
    messages = [
        USER,
        {"role": "assistant", "content": [*text("ok"), call("f", a=1), call("g")]},
        {"role": "user", "content": [*text("and?"), result("f", content="1"), result("g", content=text("2", "3"))]},
        {"role": "assistant", "content": [call("h")]},
        {"role": "user", "content": [result("h", content="no file", is_error=True)]},
        {"role": "assistant", "content": [call("i")]},
        {"role": "user", "content": [result("i")]},
    ]
    _, calls, first, second, said, third, failed, _, empty = chat_of(messages, None)
    assert calls["content"] == "ok" and [each["function"] for each in calls["tool_calls"]] == [
        {"name": "f", "arguments": {"a": 1}},
        {"name": "g", "arguments": {}},
    ]
    assert [each["id"] for each in calls["tool_calls"]] == ["id_f", "id_g"]
    assert first == {"role": "tool", "tool_call_id": "id_f", "content": "1"}
    assert (second["content"], said) == ("2\n3", {"role": "user", "content": "and?"})
    assert third["content"] == "" and failed["content"] == "Error: no file" and empty["content"] == ""


def test_thinking_of_before_is_the_assistants_reasoning() -> None:
    blocks = [
        {"type": "thinking", "thinking": "hm", "signature": "s"},
        {"type": "redacted_thinking", "data": "x"},
        *text("so"),
    ]
    (made,) = chat_of([{"role": "assistant", "content": blocks}], None)
    assert made == {"role": "assistant", "content": "so", "reasoning": "hm"}


def test_what_anthropics_own_tools_did_is_passed_over() -> None:
    blocks = [
        {"type": "server_tool_use", "id": "srvtoolu_1", "name": "web_search", "input": {"query": "q"}},
        {"type": "web_search_tool_result", "tool_use_id": "srvtoolu_1", "content": []},
        *text("so"),
    ]
    (made,) = chat_of([{"role": "assistant", "content": blocks}], None)
    assert made == {"role": "assistant", "content": "so"}
    with pytest.raises(InvalidRequestError, match="'web_search_tool_result' blocks cannot be read"):
        chat_of([{"role": "user", "content": blocks[1:2]}], None)


def test_a_tool_that_was_found_is_read_as_its_name() -> None:
    found = result("f", content=[{"type": "tool_reference", "tool_name": "read"}])
    (_, made) = chat_of([{"role": "assistant", "content": [call("f")]}, {"role": "user", "content": [found]}], None)
    assert made["content"] == "read"


def test_documents_and_search_results_are_read_where_they_are_text() -> None:
    sources = [
        {"type": "text", "media_type": "text/plain", "data": "d"},
        {"type": "content", "content": text("d")},
        {"type": "content", "content": "d"},
    ]
    for source in sources:
        document = {"type": "document", "title": "t", "source": source}
        assert chat_of([{"role": "user", "content": [document]}], None)[0]["content"] == "t\nd"
    found = {"type": "search_result", "title": "t", "source": "s", "content": text("d")}
    (_, made) = chat_of(
        [{"role": "assistant", "content": [call("f")]}, {**USER, "content": [result("f", content=[found])]}], None
    )
    assert made["content"] == "t\ns\nd"


def test_the_systems_words_may_come_later() -> None:
    told = {"role": "system", "content": "t"}
    assert chat_of([told, USER], "s")[0]["content"] == "s\nt"
    assert [m["role"] for m in chat_of([USER, told], "s")] == ["system", "user", "system"]


def test_a_last_word_of_the_assistants_is_gone_on_with(tmp_path: Path) -> None:
    server = Server(save_model(tmp_path / "m", template=TEMPLATE, context=4096))
    server.answer = "is"
    messages = [USER, {"role": "assistant", "content": text("The answer")}]
    whole, counted = post_all(server, *((path, ASKED | {"messages": messages}) for path in (MESSAGES, COUNT)))
    assert prompt_of(server) == "<|user|>u<|assistant|>The answer"
    assert whole.json()["content"][0]["text"] == "is"
    assert counted.json()["input_tokens"] == len(server.core.added[0].prompt_token_ids)


def test_an_assistant_that_has_said_nothing_is_no_beginning() -> None:
    for content in ("", [], [{"type": "thinking", "thinking": "hm"}]):
        chat = chat_of([USER, {"role": "assistant", "content": content}], None)
        assert not begun_answer(chat) and chat == [USER]
    chat = chat_of([USER, {"role": "assistant", "content": [call("f")]}], None)
    with pytest.raises(InvalidRequestError, match="results"):
        begun_answer(chat)


IMAGE = {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": ""}}


@pytest.mark.parametrize(
    ("message", "says"),
    [
        ({"role": "robot", "content": "x"}, "messages[1].role must be user or assistant"),
        ({"content": "x"}, "messages[1].role"),
        ({"role": "user"}, "messages[1].content must be a string or a list of blocks"),
        ({"role": "user", "content": {"a": 1}}, "messages[1].content must be"),
        ({"role": "user", "content": ["x"]}, "messages[1].content[0] must be an object"),
        ({"role": "user", "content": [{}]}, "messages[1].content[0].type"),
        ({"role": "user", "content": [{"type": 5}]}, "messages[1].content[0].type"),
        ({"role": "user", "content": [*text("a"), IMAGE]}, "messages[1].content[1].type: 'image' blocks"),
        (
            {"role": "user", "content": [result("f", content=[IMAGE])]},
            "messages[1].content[0].content[0].type: 'image'",
        ),
        ({"role": "user", "content": [result("f", content=5)]}, "messages[1].content[0].content must be"),
        ({"role": "user", "content": [{"type": "tool_result"}]}, "messages[1].content[0].tool_use_id"),
        ({"role": "user", "content": [call("f")]}, "messages[1].content[0].type: 'tool_use'"),
        ({"role": "user", "content": [{"type": "text", "text": 5}]}, "messages[1].content[0].text must be a string"),
        ({"role": "user", "content": [{"type": "document", "source": {"type": "base64"}}]}, "source.type"),
        ({"role": "assistant", "content": [{**call("f"), "input": "x"}]}, "messages[1].content[0].input must be"),
        ({"role": "assistant", "content": [{**call("f"), "name": None}]}, "messages[1].content[0].name"),
        ({"role": "assistant", "content": [result("f")]}, "messages[1].content[0].type: 'tool_result'"),
        ({"role": "assistant", "content": [{"type": "thinking"}]}, "messages[1].content[0].thinking"),
        ({"role": "system", "content": [IMAGE]}, "messages[1].content[0].type: 'image'"),
        ({"role": "user", "content": [{"type": "w" * 10**5}]}, "messages[1].content[0].type: 'www"),
    ],
)
def test_what_cannot_be_read_is_refused_by_its_place(message: dict[str, Any], says: str) -> None:
    with pytest.raises(InvalidRequestError) as refused:
        chat_of([USER, message], None)
    assert says in str(refused.value) and refused.value.field == "messages" and len(str(refused.value)) < 300


KINDS = (
    "text",
    "image",
    "tool_use",
    "tool_result",
    "thinking",
    "redacted_thinking",
    "document",
    "search_result",
    "content",
)
FIELDS = ("text", "id", "name", "input", "tool_use_id", "content", "is_error", "thinking", "source", "title", "data")
LEAVES = st.none() | st.booleans() | st.integers() | st.text(max_size=3)
BLOCKS = st.recursive(
    LEAVES,
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.builds(
            lambda kind, more: {**more, "type": kind},
            st.sampled_from(KINDS),
            st.dictionaries(st.sampled_from(FIELDS), inner),
        )
    ),
    max_leaves=8,
)
ROLES = st.sampled_from(["user", "assistant", "system"]) | LEAVES


@given(st.lists(st.fixed_dictionaries({}, optional={"role": ROLES, "content": BLOCKS}), max_size=4))
def test_whatever_is_sent_is_read_or_refused(messages: list[dict[str, Any]]) -> None:
    try:
        chat = chat_of(messages, None)
        begun_answer(chat)
    except InvalidRequestError:
        return
    assert all(isinstance(message["content"], str) for message in chat)
    msgspec.json.encode(chat)


def test_refusals_of_messages_come_in_anthropics_shape(tiny_server_model: Path) -> None:
    bad = ASKED | {"messages": [{"role": "user", "content": [IMAGE]}]}
    system = ASKED | {"system": [IMAGE]}
    for (path, body), place in zip(
        ((MESSAGES, bad), (COUNT, bad), (MESSAGES, system)), ("messages[0].content[0]", "messages[0]", "system[0]")
    ):
        (reply,) = post_all(Server(tiny_server_model), (path, body))
        assert reply.status_code == 400 and place in error_of(reply)["message"]
