"""What comes in parts is put together, and what goes back to the server is whole."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

from page_browser import Visit, as_stream

if TYPE_CHECKING:
    from playwright.sync_api import Route

LOOK = {
    "name": "look",
    "parameters": {
        "type": "object",
        "properties": {"at": {"enum": ["sky", "sea"]}, "far": {"type": "boolean"}},
        "required": ["at", "far"],
        "additionalProperties": False,
    },
}


def begun(index: int, name: str) -> dict[str, Any]:
    """How the server begins a call; `more` is all that it says after that."""
    function = {"name": name, "arguments": ""}
    return {"tool_calls": [{"index": index, "id": f"c{index}", "type": "function", "function": function}]}


def more(index: int, arguments: str) -> dict[str, Any]:
    return {"tool_calls": [{"index": index, "function": {"arguments": arguments}}]}


def plays(page: Visit, *answers: str) -> list[dict[str, Any]]:
    """Bodies of the requests that get `answers`."""
    bodies: list[dict[str, Any]] = []

    def reply(route: Route) -> None:
        bodies.append(json.loads(route.request.post_data or ""))
        route.fulfill(content_type="text/event-stream", body=answers[len(bodies) - 1])

    page.page.route("**/v1/chat/completions", reply)
    return bodies


def test_thinking_is_folded_and_calls_take_results(page: Visit) -> None:
    calls = [begun(0, "look"), *(more(0, part) for part in ('{"at', '":"s', 'ky"}')), begun(1, "hear"), more(1, "{}")]
    bodies = plays(
        page,
        as_stream({"reasoning": "I must "}, {"reasoning": "look."}, *calls, finish="tool_calls"),
        as_stream({"content": "It is **blue**."}),
    )
    page.set("Tools", '[{"name": "look", "parameters": {"type": "object"}}]')
    page.page.keyboard.press("Escape")
    page.say("What colour is the sky?")
    page.answered()
    assert not page.page.get_by_text("I must look.").is_visible()
    page.page.locator("summary").click()
    assert page.page.get_by_text("I must look.").is_visible()
    assert [json.loads(text) for text in page.page.locator(".call pre").all_inner_texts()] == [{"at": "sky"}, {}]
    page.page.get_by_label("Result of look").fill("blue")
    page.page.get_by_label("Result of hear").fill("wind")
    page.page.get_by_role("button", name="Go on").click()
    page.answered(2)
    assert page.page.locator(".markdown strong").inner_text() == "blue"
    assert bodies[0]["tools"] == [{"type": "function", "function": {"name": "look", "parameters": {"type": "object"}}}]
    asked, called, *results = bodies[1]["messages"]
    assert called["tool_calls"] == [
        {"id": "c0", "type": "function", "function": {"name": "look", "arguments": '{"at":"sky"}'}},
        {"id": "c1", "type": "function", "function": {"name": "hear", "arguments": "{}"}},
    ]
    assert called["reasoning"] == "I must look." and asked["role"] == "user"
    assert results == [
        {"role": "tool", "tool_call_id": "c0", "name": "look", "content": "blue"},
        {"role": "tool", "tool_call_id": "c1", "name": "hear", "content": "wind"},
    ]


def test_the_servers_own_calls_go_back_to_it_whole(page: Visit) -> None:
    streams: list[list[dict[str, Any]]] = []
    bodies: list[dict[str, Any]] = []

    def reply(route: Route) -> None:
        bodies.append(json.loads(route.request.post_data or ""))
        asked = bodies[-1] | ({"tool_choice": "required", "max_tokens": 200} if len(bodies) == 1 else {})
        response = route.fetch(post_data=json.dumps(asked))
        assert response.status == 200, response.text()
        events = [line[6:] for line in response.text().splitlines() if line.startswith("data: {")]
        chunks = [chunk["choices"][0] for chunk in map(json.loads, events) if chunk["choices"]]
        streams.append([call for choice in chunks for call in choice["delta"].get("tool_calls", [])])
        route.fulfill(response=response)

    page.page.route("**/v1/chat/completions", reply)
    page.set("Tools", json.dumps([LOOK]))
    page.page.keyboard.press("Escape")
    page.say("Look")
    page.answered()
    deltas = streams[0]
    said: list[list[Any]] = [[d["id"], d["function"]["name"], ""] for d in deltas if "id" in d]
    for delta in deltas:
        said[delta["index"]][2] += delta["function"]["arguments"]
    assert said and len(deltas) >= 2 * len(said), "arguments come after their call"
    assert page.page.locator(".call").count() == len(said)
    for number, field in enumerate(page.page.get_by_label("Result of look").all()):
        field.fill(f"blue {number}")
    page.page.get_by_role("button", name="Go on").click()
    page.answered(2)
    _, called, *results = bodies[1]["messages"]
    assert [[c["id"], c["function"]["name"], c["function"]["arguments"]] for c in called["tool_calls"]] == said
    assert [(r["tool_call_id"], r["content"]) for r in results] == [(s[0], f"blue {i}") for i, s in enumerate(said)]


def test_an_error_in_mid_stream_is_shown_beside_what_came(page: Visit) -> None:
    part = as_stream({"content": "So "}, {"content": "far"}).split("data: [DONE]")[0].rsplit("data: ", 1)[0]
    error = {"error": {"message": "the engine is gone", "type": "server_error", "param": None, "code": None}}
    plays(page, f": keep-alive\n\n{part}: keep-alive\n\ndata: {json.dumps(error)}\n\n", part)
    for count, told in enumerate(
        ("the engine is gone", "The connection was closed before the answer was complete."), 1
    ):
        page.say("Go")
        page.answered(count)
        got = page.kept()[-1]
        assert (got["content"], got["error"]) == ("So far", told)
        assert page.page.locator(".assistant .error").last.inner_text() == told


def test_what_breaks_a_schema_is_told_after_a_reload_too(page: Visit) -> None:
    chunk = {"choices": [{"index": 0, "delta": {}, "finish_reason": "stop", "schema_error": "no colour"}]}
    plays(page, as_stream({"content": "{}"}).replace("data: [DONE]", f"data: {json.dumps(chunk)}\n\ndata: [DONE]"))
    page.say("Go")
    page.answered()
    for _ in range(2):
        assert "no colour" in page.page.locator(".assistant .error").inner_text()
        page.page.reload()
        page.page.wait_for_selector(".assistant")
