"""Ollama's messages as the chat messages that templates are given."""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Mapping, Sequence
from typing import Any, NoReturn

from engine.errors import InvalidRequestError
from engine.limits import Limits

Chat = list[dict[str, Any]]


def chat_of(messages: Sequence[Mapping[str, Any]], limits: Limits) -> Chat:
    """Calls without an id get one, and results that name a tool, or nothing, the id of the first such call that has
    none yet: templates ask for them. Raises `InvalidRequestError` that says where."""
    chat: Chat = []
    waiting, count = _Waiting([]), 0
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
            calls = given["tool_calls"]
            if not isinstance(calls, list):
                _refuse(f"{where}.tool_calls must be a list of calls")
            limits.check("calls", count + len(calls), "messages")
            message["tool_calls"] = _calls(calls, f"{where}.tool_calls", count)
            count += len(calls)
            waiting = _Waiting(message["tool_calls"])
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


class _Waiting:
    """Calls without a result. `take` takes each from three queues at most, however many there are."""

    def __init__(self, calls: Chat) -> None:
        self._ids = dict(enumerate(str(call["id"]) for call in calls))
        self._all = deque(self._ids)
        self._by_id: defaultdict[str, deque[int]] = defaultdict(deque)
        self._by_name: defaultdict[str, deque[int]] = defaultdict(deque)
        for number, call in enumerate(calls):
            self._by_id[call["id"]].append(number)
            self._by_name[call["function"]["name"]].append(number)

    def take(self, own: object, name: object) -> str | None:
        """The id of the first that has this id; without one, this name; without both, the first of all."""
        queue = self._all
        if own or name:
            queue = self._by_id[str(own)] if own else self._by_name[str(name)]
        while queue:
            found = self._ids.pop(queue.popleft(), None)
            if found is not None:
                return found
        return None


def _answered(given: Mapping[str, Any], waiting: _Waiting) -> dict[str, Any]:
    name, own = given.get("tool_name", given.get("name")), given.get("tool_call_id")
    found = {"name": name} if name else {}
    own = waiting.take(own, name) or own
    return found | {"tool_call_id": own} if own else found


def _calls(given: Sequence[object], where: str, first: int) -> Chat:
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
