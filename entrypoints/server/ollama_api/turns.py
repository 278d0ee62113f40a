"""Ollama's messages as the chat messages that templates are given."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NoReturn

from engine.errors import InvalidRequestError

Chat = list[dict[str, Any]]


def chat_of(messages: Sequence[Mapping[str, Any]]) -> Chat:
    """Calls without an id get one, and results that name a tool, or nothing, the id of the first such call that has
    none yet: templates ask for them. Raises `InvalidRequestError` that says where."""
    chat: Chat = []
    waiting: list[tuple[str, str]] = []
    """id and name of calls without a result"""
    for index, given in enumerate(messages):
        where = f"messages[{index}]"
        if given.get("images"):
            _refuse(f"{where}.images cannot be read here: the model reads text")
        message: dict[str, Any] = {"role": _role(given, where), "content": given.get("content") or ""}
        if given.get("thinking"):
            message["thinking"] = given["thinking"]
        if message["role"] == "tool":
            message |= _answered(given, waiting)
        elif given.get("tool_calls"):
            message["tool_calls"] = _calls(given["tool_calls"], f"{where}.tool_calls", len(waiting) + index)
            waiting = [(call["id"], call["function"]["name"]) for call in message["tool_calls"]]
        chat.append(message)
    return chat


def begun_answer(chat: Chat) -> bool:
    """Whether the last message is the assistant's, to be gone on with."""
    last = chat[-1]
    return last["role"] == "assistant" and bool(last["content"]) and "tool_calls" not in last


def _role(given: Mapping[str, Any], where: str) -> str:
    role = given.get("role")
    if not isinstance(role, str):
        _refuse(f"{where} must be an object with a role, which is a string")
    return role.lower()


def _answered(given: Mapping[str, Any], waiting: list[tuple[str, str]]) -> dict[str, Any]:
    found: dict[str, Any] = {}
    name, own = given.get("tool_name", given.get("name")), given.get("tool_call_id")
    if name:
        found["name"] = name
    known = next((each for each in waiting if (own or each[0]) == each[0] and (name or each[1]) == each[1]), None)
    if known is not None:
        waiting.remove(known)
        own = known[0]
    return found | {"tool_call_id": own} if own else found


def _calls(given: object, where: str, first: int) -> Chat:
    if not isinstance(given, list):
        _refuse(f"{where} must be a list of calls")
    calls: Chat = []
    for number, call in enumerate(given):
        function = call.get("function") if isinstance(call, dict) else None
        if not isinstance(call, dict) or not isinstance(function, dict) or not isinstance(function.get("name"), str):
            _refuse(f"{where}[{number}] must be an object whose function has a name")
        own = call.get("id")
        name = own if isinstance(own, str) and own else f"call{(first + number) % 100_000:05d}"
        told = {"name": function["name"], "arguments": function.get("arguments") or {}}
        calls.append({"id": name, "type": "function", "function": told})
    return calls


def _refuse(message: str) -> NoReturn:
    raise InvalidRequestError(message, "messages")
