"""Every client's way of saying what an answer must be reaches the core as the same grammar."""

from __future__ import annotations

from typing import Any

import pytest
from scripted_server import CHATS, COMPLETIONS, Server, events, post_all

from engine.grammars.language import grammar_of
from engine.request import StructuredOutputsParams

CHAT = {"messages": [{"role": "user", "content": "hi"}]}
SCHEMA = {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]}
LENIENT = {"type": "array", "items": {"type": "integer"}, "uniqueItems": True}


def format_of(schema: object, **more: object) -> dict[str, Any]:
    return {"response_format": {"type": "json_schema", "json_schema": {"name": "x", "schema": schema, **more}}}


@pytest.mark.parametrize(
    ("body", "same"),
    [
        (format_of(SCHEMA, strict=True), {"json": SCHEMA}),
        (format_of(SCHEMA), {"json": SCHEMA, "strict": False}),
        (format_of(SCHEMA, strict=None), {"json": SCHEMA, "strict": False}),
        (format_of(True), {"json": "true", "strict": False}),
        ({"response_format": {"type": "json_object"}}, {"json_object": True}),
        ({"response_format": {"type": "json_object", "schema": SCHEMA}}, {"json": SCHEMA, "strict": False}),
        ({"structured_outputs": {"json": SCHEMA, "regex": None}}, {"json": SCHEMA}),
        ({"structured_outputs": {"choice": ["a", "b"]}}, {"choice": ["a", "b"]}),
        ({"guided_json": SCHEMA}, {"json": SCHEMA}),
        ({"guided_regex": "a+"}, {"regex": "a+"}),
        ({"guided_choice": ["x"], "guided_decoding_backend": "outlines"}, {"choice": ["x"]}),
        ({"guided_grammar": 'root ::= "a"'}, {"grammar": 'root ::= "a"'}),
        ({"guided_json": SCHEMA, "guided_whitespace_pattern": " ?"}, {"json": SCHEMA, "whitespace_pattern": " ?"}),
        ({"grammar": 'root ::= "b"'}, {"grammar": 'root ::= "b"'}),
        ({"json_schema": SCHEMA}, {"json": SCHEMA, "strict": False}),
        ({"response_format": {"type": "text"}, "grammar": "", "guided_json": None}, None),
    ],
)
def test_all_ways_of_saying_it_are_one(server: Server, body: dict[str, Any], same: dict[str, Any] | None) -> None:
    replies = post_all(server, (CHATS, CHAT | body), (COMPLETIONS, {"prompt": "x"} | body))
    assert [reply.status_code for reply in replies] == [200, 200], [reply.text for reply in replies]
    wanted = None if same is None else grammar_of(StructuredOutputsParams(**same))
    assert [added.grammar for added in server.core.added] == [wanted] * 2


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(("path", "start"), [(CHATS, CHAT), (COMPLETIONS, {"prompt": "x", "max_tokens": 99})])
@pytest.mark.parametrize(("answer", "told"), [("[1, 1]", "non-unique"), ("[1, 2]", None)])
def test_where_a_schema_that_is_not_strict_is_not_kept_the_answer_says_so(
    server: Server, path: str, start: dict[str, Any], stream: bool, answer: str, told: str | None
) -> None:
    server.answer = answer
    (reply,) = post_all(server, (path, {**start, **format_of(LENIENT), "stream": stream}))
    assert reply.status_code == 200, reply.text
    last = events(reply.text)[-1] if stream else reply.json()
    error = last["choices"][0].get("schema_error")
    assert (error is None) if told is None else told in error, error


def test_a_schema_that_is_not_strict_may_hold_what_no_grammar_can_enforce(server: Server) -> None:
    strict, lenient = post_all(server, *((CHATS, CHAT | format_of(LENIENT, strict=strict)) for strict in (True, False)))
    error = strict.json()["error"]
    assert (strict.status_code, error["param"]) == (400, "response_format")
    assert error["message"].startswith("response_format: ") and "structured_outputs" not in error["message"]
    assert "strict=False" not in error["message"]
    assert lenient.status_code == 200


def test_what_is_no_format_is_named_once(server: Server) -> None:
    wrong = ({"type": "json_schema"}, "json_schema"), ({"type": "yaml"}, "type")
    replies = post_all(server, *((CHATS, CHAT | {"response_format": given}) for given, _ in wrong))
    for reply, (_, place) in zip(replies, wrong, strict=True):
        message = reply.json()["error"]["message"]
        assert message.startswith(f"response_format.{place} must be ") and message.count("response_format") == 1
