"""Calls of tools in conversations, which all APIs bound: none takes longer than its length would have it."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from scripted_server import CHATS, Server, post_all, save_model
from test_tools import TEMPLATE

from engine.limits import Limits
from entrypoints.server.messages_turns import chat_of as messages_chat
from entrypoints.server.ollama_api.turns import chat_of as ollama_chat

OLLAMA, MESSAGES, RESPONSES = "/api/chat", "/v1/messages", "/v1/responses"
USER = {"role": "user", "content": "u"}


def called(path: str, counts: list[int]) -> dict[str, Any]:
    """A body whose turns hold so many calls each."""
    calls = [{"id": "c", "type": "function", "function": {"name": "f", "arguments": {}}}]
    blocks = [{"type": "tool_use", "id": "c", "name": "f", "input": {}}]
    items: list[dict[str, Any]] = [{"type": "function_call", "call_id": "c", "name": "f", "arguments": "{}"}]
    told: list[dict[str, Any]] = []
    for count in counts:
        if path == RESPONSES:
            told += [*items * count, USER]
        elif path == MESSAGES:
            told += [{"role": "assistant", "content": blocks * count}, USER]
        else:
            told += [{"role": "assistant", "content": "", "tool_calls": calls * count}, USER]
    if path == RESPONSES:
        return {"input": told, "max_output_tokens": 2}
    return {"model": "tiny", "messages": told, "stream": False, "max_tokens": 2}


@contextmanager
def linear_in(given: object) -> Iterator[None]:
    """What is done takes no more than some times what writing `given` takes on the same machine."""
    started = time.process_time()
    json.dumps(given)
    once = time.process_time() - started
    started = time.process_time()
    yield
    assert time.process_time() - started < 60 * once + 1


@pytest.mark.parametrize("path", [CHATS, MESSAGES, RESPONSES, OLLAMA])
def test_calls_of_a_conversation_are_bounded(path: str, tmp_path: Path) -> None:
    server = Server(save_model(tmp_path / "m", template=TEMPLATE, context=4096), limits=Limits(calls=5))
    many, few = post_all(server, (path, called(path, [3, 3])), (path, called(path, [2, 3])))
    assert many.status_code == 400 and "at most 5 calls" in many.text and "--limit calls=5" in many.text, many.text
    assert few.status_code == 200, few.text


def test_each_result_finds_its_call_in_a_time_that_does_not_grow_with_their_number() -> None:
    calls = [{"id": f"c{i}", "function": {"name": f"f{i % 7}"}} for i in range(100_000)]
    results = [[{"role": "tool", **which} for _ in range(1300)] for which in ({"tool_name": "f6"}, {}, {"name": "no"})]
    chat = [{"role": "assistant", "tool_calls": calls}, *(each for some in results for each in some)]
    with linear_in(chat):
        told = ollama_chat(chat, Limits(calls=100_000))
    assert [told[1]["tool_call_id"], told[2]["tool_call_id"]] == ["c6", "c13"]
    assert told[1301]["tool_call_id"] == "c0" and told[1307]["tool_call_id"] == "c7"
    assert "tool_call_id" not in told[-1]


def test_results_are_given_the_calls_that_they_name() -> None:
    calls = [
        {"id": "a", "function": {"name": "f"}},
        {"id": "a", "function": {"name": "g"}},
        {"function": {"name": "f"}},
    ]
    results: list[dict[str, Any]] = [{"tool_name": "g"}, {"tool_call_id": "a"}, {"name": "f"}, {}, {"tool_call_id": 5}]
    chat = [{"role": "assistant", "tool_calls": calls}, *({"role": "tool", **each} for each in results)]
    told = ollama_chat(chat, Limits())
    assert [each.get("tool_call_id") for each in told[1:]] == ["a", "a", "call00002", None, 5]
    assert [each.get("name") for each in told[1:]] == ["g", None, "f", None, None]


def test_blocks_in_blocks_are_read_in_a_time_that_grows_with_their_number() -> None:
    """Where each stands is a text as long as it is deep."""
    inner: list[dict[str, Any]] = [{"type": "text", "text": "t" * 20} for _ in range(200_000)]
    for _ in range(50):
        inner = [{"type": "mid_conv_system", "content": inner}, {"type": "text", "text": "u"}]
    with linear_in(inner):
        (told,) = messages_chat([{"role": "user", "content": inner}], None, Limits())
    assert len(told["content"]) > 4 * 10**6
