"""Tools as clients give them, and what they want of calls."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any, NoReturn

import msgspec
from pydantic import BaseModel
from pydantic_core import from_json

from engine.dialects.schemas import parameters_of
from engine.errors import InvalidRequestError
from engine.limits import Limits
from entrypoints.server.fields import Objects

AUTO, NONE, REQUIRED = "auto", "none", "required"
_NAMED = "named"
"""one call of one tool"""
_NAME = re.compile(r"[A-Za-z0-9_.:\-]{1,256}")
_INPUT = "input"
"""the one argument of a custom tool"""


class ToolUse(msgspec.Struct, frozen=True, kw_only=True):
    """`tools`: as chat templates take them, and only those that may be called."""

    tools: list[dict[str, Any]] = []
    required: bool = False
    parallel: bool = True
    custom: frozenset[str] = frozenset()
    """names of tools whose input is text"""
    legacy: bool = False
    """asked for as `functions`, answered as `function_call`"""

    @property
    def needs_grammar(self) -> bool:
        """Although calls may be left out: what is made of them is held to something."""
        return bool(self.tools) and (not self.parallel or any(_is_strict(tool) for tool in self.tools))


class ToolFields(BaseModel):
    tools: Objects | None = None
    tool_choice: str | dict[str, Any] | None = None
    parallel_tool_calls: bool | None = None
    functions: Objects | None = None
    """OpenAI's before `tools`"""
    function_call: str | dict[str, Any] | None = None

    def tool_use(self, limits: Limits) -> ToolUse:
        """Raises `InvalidRequestError`."""
        legacy = not self.tools and bool(self.functions)
        field = "functions" if legacy else "tools"
        given: list[dict[str, Any]] = self.tools or []
        if legacy:
            given = [{"type": "function", "function": function} for function in self.functions or ()]
        limits.check("tools", len(given), field)
        tools, custom = [], set()
        for number, tool in enumerate(given):
            made, is_custom = _tool(tool, f"{field}[{number}]", field)
            tools.append(made)
            if is_custom:
                custom.add(made["function"]["name"])
        names = names_of(tools, field)
        mode, chosen = _choice(self.function_call if legacy else self.tool_choice, names, legacy)
        if mode == NONE or not tools:
            return ToolUse()
        return ToolUse(
            tools=[tool for tool in tools if chosen is None or tool["function"]["name"] in chosen],
            required=mode in (REQUIRED, _NAMED),
            parallel=self.parallel_tool_calls is not False and not legacy and mode != _NAMED,
            custom=frozenset(custom),
            legacy=legacy,
        )


def names_of(tools: list[dict[str, Any]], field: str) -> list[str]:
    """Of tools as chat templates take them. Raises `InvalidRequestError` where two have the same."""
    names = [tool["function"]["name"] for tool in tools]
    if len(set(names)) < len(names):
        _refuse(f"{field} holds two of the name {next(n for n in names if names.count(n) > 1)!r}", field)
    return names


def _tool(given: Mapping[str, Any], where: str, field: str) -> tuple[dict[str, Any], bool]:
    kind = given.get("type", "function")
    if kind == "custom":
        return _custom(given.get("custom", given), where, field), True
    if kind != "function":
        _refuse(f"{where}.type must be function or custom, got {str(kind)[:40]!r}", field)
    function = given.get("function")
    if not isinstance(function, dict):
        _refuse(f"{where}.function must be an object", field)
    present = {key: value for key, value in function.items() if value is not None}
    check_name(present, f"{where}.function", field)
    check_parameters(present.get("parameters", {}), f"{where}.function.parameters", field)
    return {"type": "function", "function": present}, False


def _custom(given: object, where: str, field: str) -> dict[str, Any]:
    """A tool that takes any text, for templates that know functions."""
    if not isinstance(given, dict):
        _refuse(f"{where}.custom must be an object", field)
    check_name(given, f"{where}.custom", field)
    described = [str(given.get("description") or "")]
    form = given.get("format") or {}
    grammar = form.get("grammar", form) if isinstance(form, dict) else {}
    text: dict[str, Any] = {"type": "string"}
    if isinstance(grammar, dict) and grammar.get("definition"):
        described.append(f"Its {_INPUT} must match this {grammar.get('syntax', 'lark')}:\n{grammar['definition']}")
        if grammar.get("syntax") == "regex":
            text["pattern"] = f"^(?:{grammar['definition']})$"
    schema = {"type": "object", "properties": {_INPUT: text}, "required": [_INPUT], "additionalProperties": False}
    description = "\n".join(part for part in described if part)
    return {
        "type": "function",
        "function": {"name": given["name"], "description": description, "parameters": schema},
    }


def check_parameters(schema: object, where: str, field: str) -> None:
    """Raises `InvalidRequestError`."""
    if not isinstance(schema, dict):
        _refuse(f"{where} must be a JSON schema of an object", field)
    parameters_of(schema, where, field)


def check_name(given: Mapping[str, Any], where: str, field: str) -> None:
    """Raises `InvalidRequestError`."""
    name = given.get("name")
    if not isinstance(name, str) or _NAME.fullmatch(name) is None:
        _refuse(f"{where}.name must be 1 to 256 letters, digits and _ . : -", field)


def _choice(given: str | Mapping[str, Any] | None, names: list[str], legacy: bool) -> tuple[str, set[str] | None]:
    """What is asked of calls, and of which tools (None: all)."""
    field = "function_call" if legacy else "tool_choice"
    if given is None:
        return AUTO, None
    if isinstance(given, str):
        known = (AUTO, NONE) if legacy else (AUTO, NONE, REQUIRED)
        if given not in known:
            _refuse(f"{field} must be {', '.join(known)} or an object that names one, got {given[:40]!r}", field)
        if given == REQUIRED and not names:
            _refuse("tool_choice is required, but there are no tools", field)
        return given, None
    if given.get("type") == "allowed_tools":
        allowed = given.get("allowed_tools", given)
        listed = allowed.get("tools") if isinstance(allowed, dict) else None
        mode = allowed.get("mode", AUTO) if isinstance(allowed, dict) else None
        if not isinstance(listed, list) or mode not in (AUTO, REQUIRED):
            _refuse("tool_choice.allowed_tools must hold a mode (auto, required) and tools", field)
        if len(listed) > len(names):
            _refuse(f"{field}.allowed_tools names {len(listed)} tools; there are {len(names)}", field)
        return mode, {_known_name(each, names, field) for each in listed}
    if given.get("type") in (AUTO, NONE, REQUIRED):
        return _choice(given["type"], names, legacy)
    return _NAMED, {_known_name(given, names, field)}


def _known_name(given: object, names: list[str], field: str) -> str:
    inner = given.get("function") or given.get("custom") or given if isinstance(given, dict) else None
    name = inner.get("name") if isinstance(inner, dict) else None
    if not isinstance(name, str) or name not in names:
        _refuse(f"{field} names {str(name)[:60]!r}, which is none of the tools", field)
    return name


def _is_strict(tool: Mapping[str, Any]) -> bool:
    return tool["function"].get("strict") is True


def input_of(arguments: str) -> str:
    """The text that a custom tool is called with."""
    text = object_of(arguments).get(_INPUT)
    return text if isinstance(text, str) else arguments


def object_of(arguments: str) -> dict[str, Any]:
    """Of a text that may be cut: what there is."""
    try:
        found = from_json(arguments, allow_partial="trailing-strings")
    except ValueError:
        return {}
    return found if isinstance(found, dict) else {}


def _refuse(message: str, field: str) -> NoReturn:
    raise InvalidRequestError(message, field)
