"""Fields of response templates (transformers' `utils.chat_parsing`), as families of models need them."""

from __future__ import annotations

from typing import Any

JSON: dict[str, Any] = {"content": "json", "content_args": {"allow_non_json": True}, "repeats": True}
NAMED = {"function": {"name": "{name}", "arguments": "{content}"}}
WHOLE = {"function": "{content}"}
"""a body of {"name", "arguments"}, or a list of them"""


def json_calls(end: str = "", **anchors: str) -> dict[str, dict[str, Any]]:
    named = "(?P<name>" in anchors.get("open_pattern", "")
    return {"tool_calls": {**JSON, **anchors, "transform": NAMED if named else WHOLE}, **nothing(end)}


def tagged_calls(tag: str, argument: tuple[str, str], end: str = "", **anchors: str) -> dict[str, dict[str, Any]]:
    """`argument`: the marks of one's value; marks of the call within it are a part of it."""
    args = {"tag_pattern": tag, "argument": argument}
    rest = {"content": "xml-inline", "content_args": args, "repeats": True, "transform": NAMED}
    return {"tool_calls": {**anchors, **rest}, **nothing(end)}


def nothing(end: str) -> dict[str, dict[str, Any]]:
    """A mark that may come behind all calls, and says nothing."""
    return {"nothing": {"open": end, "close_pattern": "", "repeats": True}} if end else {}


def python_calls(**anchors: str) -> dict[str, dict[str, Any]]:
    return {"tool_calls": {**anchors, "content": "text", "repeats": True, "transform": {"python": "{content}"}}}
