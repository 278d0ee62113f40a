"""Which dialect a model speaks: as its checkpoint says, as whoever serves it says, or as its chat template shows."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from msgspec.structs import replace

from engine.dialects.families import ALIASES, DIALECTS, PLAIN, THINKING_ONLY
from engine.dialects.forms import Dialect
from engine.errors import ConfigError

AUTO = "auto"
NONE = "none"

_THINKING = {
    "think": ("<think>", "</think>"),
    **{name: each.thinking for name, each in DIALECTS.items() if each.thinking not in (None, ("<think>", "</think>"))},
}
"""marks by name"""
_USUAL = ("<think>", "</think>")
_VLLMS_REASONING = {
    "deepseek_r1": "think",
    "deepseek_v3": "think",
    "ernie45": "think",
    "glm45": "think",
    "granite": "think",
    "hunyuan_a13b": "think",
    "kimi_k2": "think",
    "minimax_m2": "think",
    "nemotron_v3": "think",
    "olmo3": "think",
    "openai_gptoss": "harmony",
    "qwen3": "think",
    "step3": "think",
}


def tool_parser_names() -> list[str]:
    return [AUTO, NONE, *DIALECTS, *ALIASES]


def reasoning_parser_names() -> list[str]:
    return sorted({AUTO, NONE, "harmony", *_THINKING, *_VLLMS_REASONING})


def dialect_of(
    chat_template: str | None,
    *,
    tool_parser: str = AUTO,
    reasoning_parser: str = AUTO,
    own_template: dict[str, Any] | None = None,
) -> Dialect:
    """`tool_parser`: a name, or the path of a file with a response template in JSON. `own_template`: the checkpoint's
    response template. Raises `ConfigError`."""
    template = chat_template or ""
    if tool_parser.endswith(".json"):
        return _of_template(_read(tool_parser), Path(tool_parser).stem)
    if tool_parser == AUTO and own_template is not None:
        return _of_template(own_template, "the checkpoint's")
    name = ALIASES.get(tool_parser, tool_parser)
    if name == AUTO:
        found = _shown_by(template)
    elif name == NONE:
        found = PLAIN
    elif name in DIALECTS:
        found = DIALECTS[name]
    else:
        raise ConfigError(
            f"tool_call_parser must be one of {', '.join(tool_parser_names())}, or a .json file, got {tool_parser!r}"
        )
    return _with_thinking(found, template, reasoning_parser)


_NOBODYS = ("]<]minimax[>[",)
"""marks of families that nobody here reads, though they hold another's (MiniMax M3)"""


def _shown_by(template: str) -> Dialect:
    if any(mark in template for mark in _NOBODYS):
        return PLAIN
    for each in DIALECTS.values():
        known = bool(each.known_by) and all(mark in template for mark in each.known_by)
        if known or any(mark in template for mark in each.also_by):
            return each
    return PLAIN


def _with_thinking(found: Dialect, template: str, parser: str) -> Dialect:
    if "harmony" in (found.name, _VLLMS_REASONING.get(parser, parser)):
        return DIALECTS["harmony"]
    if parser == NONE:
        return replace(found, thinking=None)
    if parser != AUTO:
        marks = _THINKING.get(_VLLMS_REASONING.get(parser, parser))
        if marks is None:
            raise ConfigError(f"reasoning_parser must be one of {', '.join(reasoning_parser_names())}, got {parser!r}")
        return replace(found if found is not PLAIN else THINKING_ONLY, thinking=marks)
    own = found.thinking or _USUAL
    marks = next((each for each in (own, *_THINKING.values()) if each is not None and each[1] in template), None)
    return replace(found if found is not PLAIN or marks is None else THINKING_ONLY, thinking=marks)


def _read(path: str) -> dict[str, Any]:
    try:
        found = json.loads(Path(path).read_text())
    except (OSError, ValueError) as error:
        raise ConfigError(f"tool_call_parser: {path} cannot be read: {error}") from error
    if not isinstance(found, dict):
        raise ConfigError(f"tool_call_parser: {path} must hold an object, a response template")
    return found


def _of_template(given: dict[str, Any], name: str) -> Dialect:
    """Calls that are required are written as a known dialect writes them, where marks are the same."""
    fields = given.get("fields")
    if not isinstance(fields, dict) or not all(isinstance(each, dict) for each in fields.values()):
        raise ConfigError(f"response template ({name}): fields must be an object of objects")
    renamed = {("reasoning" if key in ("thinking", "reasoning_content") else key): each for key, each in fields.items()}
    thinking = renamed.get("reasoning", {})
    marks = thinking.get("open"), thinking.get("close")
    calls = renamed.get("tool_calls", {})
    known = next((each for each in DIALECTS.values() if _opens_alike(calls, each)), None)
    own_marks = marks if all(isinstance(mark, str) for mark in marks) else None
    if own_marks is not None:
        del renamed["reasoning"]
    return Dialect(
        name=name,
        fields=renamed,
        form=None if known is None else known.form,
        thinking=own_marks,
        call_ids="random" if known is None else known.call_ids,
    )


def _opens_alike(calls: dict[str, Any], known: Dialect) -> bool:
    own = known.fields.get("tool_calls", {})
    mark = calls.get("open") or calls.get("open_pattern")
    return mark is not None and mark == (own.get("open") or own.get("open_pattern"))
