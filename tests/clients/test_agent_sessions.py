"""Sessions of coding agents, five turns with tools: each is answered, and from the second on nearly all of the prompt
is found in the cache."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import Any

import claude_code
import codex
import pytest
from agent_model import answer, call, events, prose, save_model, serving

MOSTLY = 0.95
BLOCK = 16
Turn = tuple[int, int]
"""tokens of the prompt: found in the cache, and all"""
THOUGHT = prose(60, 1)
FILE = prose(250, 2)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    texts = [json.dumps(claude_code.tools()), json.dumps(codex.TOOLS), prose(4000, 3), answer("", call("Read", a="/b"))]
    return save_model(tmp_path_factory.mktemp("agents") / "tiny", texts)


def nearly_all_was_cached(turns: list[Turn], asked_again: int) -> None:
    """Each time the whole prompt of the turn before, to the block; but where the user has `asked_again` the template
    drops what was thought until then, and what had been said before it thought is found."""
    assert len(turns) == 5 and all(cached >= MOSTLY * prompt for cached, prompt in turns[1:]), turns
    for number in range(1, 5):
        before = 0 if number == asked_again else number - 1
        assert turns[number][0] > turns[before][1] - BLOCK, (number, turns)


def test_five_turns_of_claude_code(model: Path) -> None:
    script = [
        answer('{"title": "Rename the parser"}'),
        answer("Let me look.", call("Read", file_path="/project/parser.py"), thought=THOUGHT),
        answer(
            "", call("Grep", pattern="Parser", output_mode="count"), call("Glob", pattern="**/*.py"), thought="And?"
        ),
        answer("Now the change.", call("Edit", file_path="/project/parser.py", old_string="a = 1", new_string="b = 1")),
        answer("Done: it is renamed.", thought="Nothing is left."),
        answer(
            "I run the tests.", call("Bash", command="pytest -q", description="Run tests"), thought="Now the tests."
        ),
    ]
    asyncio.run(_claude_code(model, script))


async def _claude_code(model: Path, script: list[str]) -> None:
    session = claude_code.Session("Rename the parser.")
    async with serving(model, script) as client:
        client.headers.update(claude_code.HEADERS)

        async def turn(body: dict[str, Any]) -> tuple[list[dict[str, Any]], str, dict[str, int]]:
            reply = await client.post("/v1/messages?beta=true", json=body)
            assert reply.status_code == 200 and "x-pageloom-ignored" not in reply.headers, reply.text[:500]
            return claude_code.message_of(events(reply.text))

        title, _, _ = await turn(session.title())
        assert json.loads(title[-1]["text"]) == {"title": "Rename the parser"}
        counted = await client.post("/v1/messages/count_tokens?beta=true", json=session.count())
        turns: list[Turn] = []
        replies = [[(FILE, False)], [("7 matches", False), ("No such directory", True)], [("Changed.", False)], [], []]
        for number, results in enumerate(replies):
            blocks, reason, usage = await turn(session.body())
            prompt = usage["input_tokens"] + usage["cache_read_input_tokens"]
            turns.append((usage["cache_read_input_tokens"], prompt))
            assert prompt > counted.json()["input_tokens"] > 9_000, "as long as real ones"
            uses = [each for each in blocks if each["type"] == "tool_use"]
            assert reason == ("end_turn" if number == 3 else "tool_use"), blocks
            session.messages.append({"role": "assistant", "content": blocks})
            if number == 3:
                session.say(claude_code.block("Now run the tests."))
                continue
            assert number == 4 or len(uses) == len(results)
            said = [claude_code.result(use, text, wrong=wrong) for use, (text, wrong) in zip(uses, results)]
            if number == 2:
                said.append(claude_code.block(f"<system-reminder>\n{prose(30, 7)}\n</system-reminder>"))
            if said:
                session.say(*said)
        assert uses[0]["name"] == "Bash" and uses[0]["input"]["command"] == "pytest -q"
        nearly_all_was_cached(turns, asked_again=3)  # a reminder beside results is the user's


def test_five_turns_of_codex(model: Path) -> None:
    script = [
        answer("", call("exec_command", cmd="sed -n 1,80p parser.py", workdir="/proj"), thought=THOUGHT),
        answer("I change it.", call("apply_patch", input=codex.PATCH), thought="A patch."),
        answer("", call("mcp__docs__search", query="parser"), thought="What do the docs say?"),
        answer("Done: it is renamed.", thought="Nothing is left."),
        answer("", call("exec_command", cmd="pytest -q"), thought="Now the tests."),
    ]
    asyncio.run(_codex(model, script))


async def _codex(model: Path, script: list[str]) -> None:
    session = codex.Session("Rename the parser.")
    outputs = [FILE, "Success. Updated the following files:\nM parser.py", '{"hits": []}', None, None]
    kinds = ["function_call", "custom_tool_call", "function_call", "message", "function_call"]
    turns: list[Turn] = []
    async with serving(model, script) as client:
        client.headers.update(codex.HEADERS)
        for kind, output in zip(kinds, outputs):
            reply = await client.post("/v1/responses", json=session.body())
            assert reply.status_code == 200, reply.text[:500]
            assert reply.headers["x-pageloom-ignored"] == f"tools[{len(codex.TOOLS) - 1}].web_search"
            items, usage = codex.items_of(events(reply.text))
            assert usage["input_tokens"] > 15_000, "as long as real ones"
            cached = usage["input_tokens_details"]["cached_tokens"]
            turns.append((cached, usage["input_tokens"]))
            assert items[0]["type"] == "reasoning" and items[-1]["type"] == kind, items
            session.take(items, output)
            if kind == "message":
                session.say("Now run the tests.")
    assert items[-1]["name"] == "exec_command"
    patched = next(item for item in session.input if item["type"] == "custom_tool_call")
    searched = next(item for item in session.input if item.get("namespace"))
    assert patched["input"] == codex.PATCH and (searched["namespace"], searched["name"]) == ("mcp__docs", "search")
    nearly_all_was_cached(turns, asked_again=4)
