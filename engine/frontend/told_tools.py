"""Tools for chat templates that know of none: told in words, in a system message; calls and results as plain text.

What is asked of the model is hermes' way, which most models have seen (`engine.dialects.families`).
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from typing import Any

_KNOWS_TOOLS = re.compile(r"\btools\b")
_TELLING = """You may call one or more of these functions, given as JSON schemas, one a line:
<tools>
{tools}
</tools>
To call one, write nothing but a JSON object with its name and its arguments within <tool_call></tool_call>, such as:
<tool_call>
{{"name": "a_function", "arguments": {{"an_argument": "a value"}}}}
</tool_call>
What they return comes within <tool_response></tool_response>. Answer in plain words when no function is needed."""


def knows_tools(template: str) -> bool:
    return _KNOWS_TOOLS.search(template) is not None


def told(messages: Sequence[Mapping[str, Any]], tools: Sequence[Mapping[str, Any]] | None) -> list[dict[str, Any]]:
    """`messages` as `messages.plain_message` leaves them. The tools stand in the first system message, or in one that
    is put before all."""
    chat = [_in_words(message) for message in messages]
    if not tools:
        return chat
    lines = "\n".join(json.dumps(tool, ensure_ascii=False) for tool in tools)
    text = _TELLING.format(tools=lines)
    if chat and chat[0].get("role") == "system":
        first = chat[0]
        return [{**first, "content": f"{first.get('content') or ''}\n\n{text}".lstrip()}, *chat[1:]]
    return [{"role": "system", "content": text}, *chat]


def _in_words(message: Mapping[str, Any]) -> dict[str, Any]:
    if message.get("role") == "tool":
        return {"role": "user", "content": f"<tool_response>\n{message.get('content') or ''}\n</tool_response>"}
    calls = message.get("tool_calls")
    if not calls:
        return dict(message)
    texts = [message.get("content") or ""]
    for call in calls:
        function = call["function"]
        body = {"name": function["name"], "arguments": function["arguments"]}
        texts.append(f"<tool_call>\n{json.dumps(body, ensure_ascii=False)}\n</tool_call>")
    rest = {key: value for key, value in message.items() if key != "tool_calls"}
    return {**rest, "content": "\n".join(text for text in texts if text)}
