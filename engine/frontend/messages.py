"""Messages as clients send them, in the shape that chat templates read.

Runs in the process that renders (`engine.frontend.conversation`).
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any, NoReturn

from engine.errors import InvalidRequestError
from engine.limits import Limits

ROLES = ("system", "developer", "user", "assistant", "tool", "function")
"""a template's own are taken, too, where it names them"""
_INSTEAD = {"developer": "system", "function": "tool"}
"""for templates that do not know a role"""
_TEXT_PARTS = {"text": "text", "input_text": "text", "output_text": "text", "refusal": "refusal"}
"""kinds of content parts that are text, and where it stands"""


def plain_messages(messages: Sequence[Mapping[str, Any]], template: str, limits: Limits) -> list[dict[str, Any]]:
    """Results of tools get the name of the call that they answer, which some templates read and clients leave out.
    Raises `InvalidRequestError`."""
    plain, names, count = [], {}, 0
    roles = _Roles(template)
    for index, given in enumerate(messages):
        message = plain_message(index, given, roles)
        calls = message.get("tool_calls") or ()
        count += len(calls)
        limits.check("calls", count, "messages")
        for call in calls:
            names[str(call.get("id"))] = call["function"]["name"]
        name = names.get(str(message.get("tool_call_id")))
        if message["role"] == "tool" and name is not None:
            message.setdefault("name", name)
        plain.append(message)
    return plain


def plain_message(index: int, message: Mapping[str, Any], roles: _Roles) -> dict[str, Any]:
    """Text parts become one string, joined by newlines, since most templates know only strings. An assistant's content
    that is left out, as beside tool calls, is empty, and calls' arguments are objects. Raises `InvalidRequestError`."""
    where = f"messages[{index}]"
    plain = {**message, "role": _role(message, where, roles)}
    if isinstance(plain.get("content"), list):
        plain["content"] = _text_of_parts(plain["content"], where)
    elif not isinstance(plain.get("content"), (str, type(None))):
        _refuse(f"{where}.content must be a string or a list of text parts")
    if plain["role"] == "assistant":
        if plain.get("content") is None:
            plain["content"] = ""
        call = plain.pop("function_call", None)
        if call is not None and not plain.get("tool_calls"):
            plain["tool_calls"] = [{"type": "function", "function": call}]
        if plain.get("tool_calls"):
            plain["tool_calls"] = _calls(plain["tool_calls"], where)
        else:
            plain.pop("tool_calls", None)
    elif plain.get("content") is None and message["role"] in ROLES:
        _refuse(f"{where}.content is missing")
    return plain


class _Roles(dict[str, bool]):
    """Whether a template names a role. It may be long, so it is asked once for each."""

    def __init__(self, template: str) -> None:
        self._template = template

    def __missing__(self, role: str) -> bool:
        self[role] = f"'{role}'" in self._template or f'"{role}"' in self._template
        return self[role]


def _role(message: Mapping[str, Any], where: str, roles: _Roles) -> str:
    role = message.get("role")
    if not isinstance(role, str):
        _refuse(f"{where} must be an object with a role, which is a string")
    if roles[role]:
        return role
    if role not in ROLES:
        _refuse(f"{where}.role must be one of {', '.join(ROLES)}, got {role[:40]!a}")
    return _INSTEAD.get(role, role)


def _text_of_parts(parts: list[Any], where: str) -> str:
    texts = []
    for number, part in enumerate(parts):
        text = part
        if isinstance(part, dict):
            kind = part.get("type", "text")
            if not isinstance(kind, str) or kind not in _TEXT_PARTS:
                _refuse(f"{where}.content[{number}]: {str(kind)[:40]} is not supported")
            text = part.get(_TEXT_PARTS[kind])
        if not isinstance(text, str):
            _refuse(f"{where}.content[{number}] must be a text, or an object with a text")
        texts.append(text)
    return "\n".join(texts)


def _calls(calls: object, where: str) -> list[dict[str, Any]]:
    if not isinstance(calls, list):
        _refuse(f"{where}.tool_calls must be a list of calls")
    return [_call(call, f"{where}.tool_calls[{number}]") for number, call in enumerate(calls)]


def _call(call: object, where: str) -> dict[str, Any]:
    function = call.get("function") if isinstance(call, dict) else None
    if not isinstance(call, dict) or not isinstance(function, dict) or not isinstance(function.get("name"), str):
        _refuse(f"{where} must be an object whose function has a name")
    return {**call, "function": {**function, "arguments": _arguments(function.get("arguments"))}}


def _arguments(arguments: object) -> object:
    """Clients send them as text; templates write objects, and text as text."""
    if arguments is None or arguments == "":
        return {}
    if not isinstance(arguments, str):
        return arguments
    try:
        parsed = json.loads(arguments)
    except ValueError:
        return arguments
    return parsed if isinstance(parsed, dict) else arguments


def _refuse(message: str) -> NoReturn:
    raise InvalidRequestError(message, "messages")
