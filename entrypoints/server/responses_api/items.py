"""Items of a response's input as messages that chat templates read."""

from __future__ import annotations

import base64
import binascii
import json
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NoReturn

from engine.errors import InvalidRequestError
from engine.limits import Limits

_SEAL = "pageloom1:"
"""before what clients bring back unread"""
_HOSTED = ("_call", "_call_output", "_search_output", "_list_tools", "_approval_request", "_approval_response")
"""ends of kinds that tell what OpenAI's own tools did"""
SUMMARY = "What was said before, in short:\n"

Lookup = Callable[[str], "dict[str, Any] | None"]


def sealed(text: str) -> str:
    """For clients that only store and return it. Nothing is secret in it: it came from them, or was theirs to see."""
    return _SEAL + base64.b64encode(text.encode()).decode()


def unsealed(text: object) -> str | None:
    if not isinstance(text, str) or not text.startswith(_SEAL):
        return None
    try:
        return base64.b64decode(text.removeprefix(_SEAL), validate=True).decode()
    except (binascii.Error, UnicodeDecodeError):
        return None


def resolved(items: Sequence[Mapping[str, Any]], lookup: Lookup) -> list[dict[str, Any]]:
    """With stored items, which `lookup` finds by their ids, in place of references. Raises `InvalidRequestError`."""
    found = []
    for number, item in enumerate(items):
        refers = item.get("type") == "item_reference" or (not ({"type", "role"} & item.keys()) and "id" in item)
        if not refers:
            found.append(dict(item))
            continue
        name = str(item.get("id"))
        there = lookup(name)
        if there is None:
            _refuse(f"input[{number}]: no stored item has the id {name[:80]!r}")
        found.append(there)
    return found


def as_listed(item: Mapping[str, Any]) -> dict[str, Any]:
    """An input item as OpenAI gives it back: it has ended, and what a message says is a list of parts."""
    shown = {"type": "message", "status": "completed", **item}
    if shown["type"] == "message" and isinstance(shown.get("content"), str):
        part = {"type": "input_text", "text": shown["content"]}
        if shown.get("role") == "assistant":
            part |= {"type": "output_text", "annotations": [], "logprobs": []}
        shown["content"] = [part]
    return shown


class Messages:
    """Items become messages: thinking, text and calls of one turn are one message of the assistant's."""

    def __init__(self, namespaces: Mapping[str, tuple[str, str]], limits: Limits) -> None:
        self._limits, self._calls = limits, 0
        self._names = {inner: name for name, inner in namespaces.items()}
        self.messages: list[dict[str, Any]] = []
        self._turn: dict[str, Any] | None = None

    def add(self, items: Sequence[Mapping[str, Any]]) -> None:
        """Raises `InvalidRequestError`."""
        for number, item in enumerate(items):
            self._add(item, f"input[{number}]")

    def _add(self, item: Mapping[str, Any], where: str) -> None:
        kind = item.get("type", "message" if "role" in item else None)
        if kind == "message":
            self._message(item, where)
        elif kind == "reasoning":
            self._assistant("reasoning")["reasoning"] = _thinking(item, where)
        elif kind in ("function_call", "custom_tool_call"):
            self._call(item, kind, where)
        elif kind in ("function_call_output", "custom_tool_call_output"):
            self._output(item, where)
        elif kind in ("compaction", "compaction_summary"):
            self._put({"role": "system", "content": SUMMARY + (unsealed(item.get("encrypted_content")) or "")})
        elif not (isinstance(kind, str) and kind.endswith(_HOSTED)):
            _refuse(f"{where}.type is not known: {str(kind)[:60]!r}")

    def _message(self, item: Mapping[str, Any], where: str) -> None:
        content = item.get("content")
        if isinstance(content, list):
            for number, part in enumerate(content):
                if isinstance(part, Mapping) and part.get("type") in ("input_image", "input_file", "input_audio"):
                    _refuse(f"{where}.content[{number}]: {part['type']} is not supported: this model reads text")
        elif not isinstance(content, str):
            _refuse(f"{where}.content must be a string or a list of parts")
        if item.get("role") == "assistant":
            self._assistant("content")["content"] = content
        else:
            self._put({"role": item.get("role"), "content": content})

    def _call(self, item: Mapping[str, Any], kind: str, where: str) -> None:
        name, number = item.get("name"), item.get("call_id", item.get("id"))
        if not isinstance(name, str) or not isinstance(number, str):
            _refuse(f"{where} must have a name and a call_id")
        self._calls += 1
        self._limits.check("calls", self._calls, "input")
        name = self._names.get((str(item.get("namespace")), name), name)
        arguments = item.get("arguments", "{}")
        if kind == "custom_tool_call":
            arguments = json.dumps({"input": item.get("input", "")}, ensure_ascii=False)
        call = {"id": number, "type": "function", "function": {"name": name, "arguments": arguments}}
        self._assistant("tool_calls").setdefault("tool_calls", []).append(call)

    def _output(self, item: Mapping[str, Any], where: str) -> None:
        output = item.get("output")
        if not isinstance(output, (str, list)):
            _refuse(f"{where}.output must be a string or a list of parts")
        self._put({"role": "tool", "tool_call_id": str(item.get("call_id")), "content": output})

    def _put(self, message: dict[str, Any]) -> None:
        self._turn = None
        self.messages.append(message)

    def _assistant(self, part: str) -> dict[str, Any]:
        """The turn that `part` belongs to: thinking comes before text, and text before calls."""
        order = ("reasoning", "content", "tool_calls")
        later = order[order.index(part) + (part == "tool_calls") :]
        turn = self._turn
        if turn is None or any(turn.get(name) is not None for name in later):
            turn = self._turn = {"role": "assistant", "content": None}
            self.messages.append(turn)
        return turn


def _thinking(item: Mapping[str, Any], where: str) -> str:
    parts = item.get("content") or item.get("summary") or []
    if not isinstance(parts, list):
        _refuse(f"{where}.content must be a list of parts")
    texts = [part.get("text") for part in parts if isinstance(part, Mapping)]
    known = "".join(text for text in texts if isinstance(text, str))
    return known or unsealed(item.get("encrypted_content")) or ""


def _refuse(message: str) -> NoReturn:
    raise InvalidRequestError(message, "input")
