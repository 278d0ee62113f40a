"""Anthropic's messages as the chat messages that templates are given: turns of blocks become one message each, results
of tools messages of their own."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NoReturn

from engine.errors import InvalidRequestError
from engine.limits import Limits

Chat = list[dict[str, Any]]
_Blocks = list[tuple[str, Mapping[str, Any]]]
"""each with where it stands in the body, as ``messages[2].content[0]``"""

_CHANGING = "x-anthropic-billing-header:"
"""A line that Claude Code puts before its system prompt, other for each request: no cached prefix would be found behind
it."""
_DROPPED = ("redacted_thinking", "server_tool_use")
"""nobody but who wrote it can read it; what Anthropic's own tools did, with their results (``…_tool_result``)"""


def chat_of(
    messages: Sequence[Mapping[str, Any]], system: str | Sequence[Mapping[str, Any]] | None, limits: Limits
) -> Chat:
    """Raises `InvalidRequestError` that says where."""
    chat, calls = _system(_blocks_of(system or "", "system")), 0
    for role, blocks in _turns(messages):
        calls += sum(block.get("type") == "tool_use" for _, block in blocks)
        results = sum(block.get("type") == "tool_result" for _, block in blocks)
        limits.check("calls", calls, "messages")
        limits.check("messages", len(chat) + results, "messages")
        chat += _TURNS[role](blocks)
    if [message["role"] for message in chat[:2]] == ["system", "system"]:
        first, second, *rest = chat
        return [first | {"content": _joined([first["content"], second["content"]])}, *rest]
    return chat


def begun_answer(chat: Chat) -> bool:
    """Whether the last message is the assistant's, to be gone on with; one that says nothing is taken away. Raises
    `InvalidRequestError` where it calls tools: what comes next are their results."""
    if not chat or chat[-1]["role"] != "assistant":
        return False
    if chat[-1].get("tool_calls"):
        _refuse("messages: the last turn uses tools; their results (tool_result blocks of the user) must follow it")
    if not chat[-1]["content"]:
        chat.pop()
        return False
    return True


def _turns(messages: Sequence[Mapping[str, Any]]) -> Iterator[tuple[str, _Blocks]]:
    """Messages of one role that follow each other are one turn, as Anthropic has it."""
    before, blocks = "", _Blocks()
    for index, message in enumerate(messages):
        role, content = message.get("role"), message.get("content")
        if not isinstance(role, str) or role not in _TURNS:
            _refuse(f"messages[{index}].role must be user or assistant, got {str(role)[:40]!a}")
        if role != before and blocks:
            yield before, blocks
            blocks = []
        before = role
        blocks += _blocks_of(content, f"messages[{index}].content")
    if blocks:
        yield before, blocks


def _blocks_of(content: object, where: str) -> _Blocks:
    if isinstance(content, str):
        return [(where, {"type": "text", "text": content})]
    if not isinstance(content, Sequence):
        _refuse(f"{where} must be a string or a list of blocks")
    for number, block in enumerate(content):
        if not isinstance(block, Mapping):
            _refuse(f"{where}[{number}] must be an object with a type")
    return [(f"{where}[{number}]", block) for number, block in enumerate(content)]


def _user(blocks: _Blocks) -> Chat:
    results: Chat = []
    texts: list[str] = []
    for where, block in blocks:
        if block.get("type") == "tool_result":
            results.append(_result(where, block))
        else:
            texts.append(_text(where, block))
    return [*results, {"role": "user", "content": _joined(texts)}] if texts else results


def _result(where: str, block: Mapping[str, Any]) -> dict[str, Any]:
    text = "" if block.get("content") is None else _inner(where, block)
    if block.get("is_error") is True:
        text = f"Error: {text}"
    return {"role": "tool", "tool_call_id": _string(block, "tool_use_id", where), "content": text}


def _assistant(blocks: _Blocks) -> Chat:
    texts: list[str] = []
    thoughts: list[str] = []
    calls: Chat = []
    for where, block in blocks:
        kind = block.get("type")
        if kind == "thinking":
            thoughts.append(_string(block, "thinking", where))
        elif kind == "tool_use":
            calls.append(_call(where, block))
        elif kind not in _DROPPED and not str(kind).endswith("_tool_result"):
            texts.append(_text(where, block))
    message: dict[str, Any] = {"role": "assistant", "content": _joined(texts)}
    if thought := _joined(thoughts):
        message["reasoning"] = thought
    if calls:
        message["tool_calls"] = calls
    return [message]


def _call(where: str, block: Mapping[str, Any]) -> dict[str, Any]:
    given = block.get("input", {})
    if not isinstance(given, dict):
        _refuse(f"{where}.input must be an object")
    function = {"name": _string(block, "name", where), "arguments": given}
    return {"id": _string(block, "id", where), "type": "function", "function": function}


def _system(blocks: _Blocks) -> Chat:
    told = _joined(_said(where, block) for where, block in blocks)
    return [{"role": "system", "content": told}] if told else []


_TURNS: dict[str, Callable[[_Blocks], Chat]] = {"user": _user, "assistant": _assistant, "system": _system}


def _said(where: str, block: Mapping[str, Any]) -> str:
    """A block of the system's."""
    text = _text(where, block)
    return text.partition("\n")[2] if text.startswith(_CHANGING) else text


def _text(where: str, block: Mapping[str, Any]) -> str:
    kind = block.get("type")
    read = _TEXTS.get(kind) if isinstance(kind, str) else None
    if read is None:
        told = f"{kind[:60]!a} blocks" if isinstance(kind, str) else "what has no type"
        _refuse(f"{where}.type: {told} cannot be read here: the model reads text")
    return read(where, block)


def _document(where: str, block: Mapping[str, Any]) -> str:
    source = block.get("source")
    kind = source.get("type") if isinstance(source, Mapping) else None
    if not isinstance(source, Mapping) or kind not in ("text", "content"):
        _refuse(f"{where}.source.type: documents are read as text or content, not {str(kind)[:40]!a}")
    if kind == "text":
        text = _string(source, "data", f"{where}.source")
    else:
        text = _inner(f"{where}.source", source)
    heads = (block.get(name) for name in ("title", "context"))
    return _joined([*(head for head in heads if isinstance(head, str)), text])


def _search_result(where: str, block: Mapping[str, Any]) -> str:
    return _joined([_string(block, "title", where), _string(block, "source", where), _inner(where, block)])


def _inner(where: str, block: Mapping[str, Any]) -> str:
    blocks = _blocks_of(block.get("content"), f"{where}.content")
    return _joined(_text(inner, each) for inner, each in blocks)


_TEXTS: dict[str, Callable[[str, Mapping[str, Any]], str]] = {
    "text": lambda where, block: _string(block, "text", where),
    "document": _document,
    "search_result": _search_result,
    "tool_reference": lambda where, block: _string(block, "tool_name", where),
    "mid_conv_system": _inner,
}


def _string(block: Mapping[str, Any], field: str, where: str) -> str:
    text = block.get(field)
    if not isinstance(text, str):
        _refuse(f"{where}.{field} must be a string")
    return text


def _joined(texts: Iterator[str] | Sequence[str]) -> str:
    return "\n".join(text for text in texts if text)


def _refuse(message: str) -> NoReturn:
    raise InvalidRequestError(message, "system" if message.startswith("system") else "messages")
