"""Which calls an answer may hold, in llguidance's Lark: for calls that are required, strict or one at most."""

from __future__ import annotations

import json
import keyword
import re
from collections.abc import Mapping, Sequence
from typing import Any

from engine.dialects.forms import CallForm, Tagged
from engine.dialects.schemas import parameters_of, types_of
from engine.errors import InvalidRequestError
from engine.grammars.marks import Marks

_MARK = re.compile(r"<[^<>\n]{2,}>|\[[A-Z_]+\]")
_NUMBER = "/[0-9]{1,3}/"
_TEXT = "(?s:.*)"
MOST_CALLS = 16
"""in one answer that a grammar holds to calls: small models go on with the same one for as long as they may"""


class _Rules:
    """Lark's rules, each under a name of its own."""

    def __init__(self, form: CallForm, marks: Marks, options: Mapping[str, Any]) -> None:
        self.form, self.marks, self.options = form, marks, options
        self.lines: list[str] = []

    def add(self, name: str, body: str, attributes: str = "") -> str:
        self.lines.append(f"{name}{attributes}: {body}")
        return name

    def literal(self, text: str) -> str:
        """{n} is a number."""
        return f" {_NUMBER} ".join(self.marks.lark(part) for part in text.split("{n}"))

    def json(self, schema: Any) -> str:
        return "%json " + json.dumps({**schema, "x-guidance": self.options}, ensure_ascii=False)

    def arguments(self, name: str, parameters: Mapping[str, Any]) -> str:
        tagged = self.form.arguments
        return self.json(parameters) if tagged is None else self._tagged(name, tagged, parameters)

    def _tagged(self, name: str, tagged: Tagged, parameters: Mapping[str, Any]) -> str:
        """In the schema's order. Of two rules for each, one is for where nothing came before."""
        properties = parameters.get("properties") or {}
        required = set(parameters.get("required") or ())
        first = next_one = ""
        for number, (key, schema) in reversed(list(enumerate(properties.items()))):
            item = self._item(f"{name}_{number}", tagged, key, schema, parameters)
            rules = []
            for kind, before in (("a", ""), ("b", self.marks.lark(tagged.joined))):
                there = f"{before} {item} {next_one}"
                rest = first if kind == "a" else next_one
                gone = "" if key in required else f" | {rest or chr(34) * 2}"
                rules.append(self.add(f"{name}_{number}{kind}", there + gone))
            first, next_one = rules
        return first

    def _item(self, name: str, tagged: Tagged, key: str, schema: Any, root: Mapping[str, Any]) -> str:
        head, _, tail = tagged.item.partition("{value}")
        return f"{self.marks.lark(head.replace('{key}', key))} {self._value(name, tagged, key, schema, root, tail)}"

    def _value(self, name: str, tagged: Tagged, key: str, schema: Any, root: Mapping[str, Any], tail: str) -> str:
        """With what follows it."""
        schema = schema if isinstance(schema, Mapping) else {}
        behind = self.marks.lark(tail)
        kinds = types_of(schema, root)
        members = _members(schema)
        raw = not isinstance(tagged.texts, str) or tagged.texts == "raw"
        left, right = ("", "") if isinstance(tagged.texts, str) else (tagged.texts[0], tagged.texts[0])
        if raw and members is not None:
            words = [left + each + right if isinstance(each, str) else json.dumps(each) for each in members]
            choice = " | ".join(self.marks.lark(word) or '""' for word in words)
            return f"({choice}) {behind}"
        if raw and (not kinds or "string" in kinds):
            if schema.get("pattern") and not self.options["lenient"]:
                raise InvalidRequestError(
                    f"tools: {key!r}: this model writes texts as they are, where a pattern cannot be enforced (strict)",
                    "tools",
                )
            return f"{self.marks.lark(left)} {self._text_until(name, right + tail)}"
        if tagged.python and schema.get("type") in ("boolean", "null"):
            return f"{chr(40)}{_PYTHON[schema['type']]}{chr(41)} {behind}"
        definitions = {word: root[word] for word in ("$defs", "definitions") if word in root}
        return f"{self.json({**schema, **definitions})} {behind}"

    def _text_until(self, name: str, end: str) -> str:
        if self.marks.begins_special(end):
            return f"/{_TEXT}/ {self.marks.lark(end)}"
        head, rest = self.marks.split_before_special(end)
        self.add(f"{name}_text", f"/{_TEXT}/ {self.marks.lark(head)}", "[lazy]")
        return f"{name}_text {self.marks.lark(rest)}"


_PYTHON = {"boolean": '"True" | "False"', "null": '"None"'}


def _members(schema: Mapping[str, Any]) -> list[Any] | None:
    """Where it is one of some."""
    members = schema.get("enum", [schema["const"]] if "const" in schema else None)
    return members if isinstance(members, list) and members else None


def _check_names(form: CallForm, name: str, parameters: Mapping[str, Any]) -> None:
    """Raises `InvalidRequestError` for what cannot be a keyword of Python's where calls are written as its."""
    if form.arguments is None or not form.arguments.python:
        return
    for each in (*name.split("."), *(parameters.get("properties") or {})):
        if not each.isidentifier() or keyword.iskeyword(each):
            raise InvalidRequestError(
                f"tools: {name!r}: this model writes calls as Python does, where {each[:60]!r} is no name: it cannot "
                "be required, strict or limited",
                "tools",
            )


def calls_grammar(
    form: CallForm,
    tools: Sequence[Mapping[str, Any]],
    marks: Marks,
    *,
    required: bool,
    parallel: bool,
    whitespace: str,
) -> str:
    """`tools`: ``{"type": "function", "function": {"name", "parameters", "strict"}}``. `required`: there is a call, and
    nothing but calls; else there may be text, and calls behind it. Raises `InvalidRequestError`."""
    rules = _Rules(form, marks, {})
    ones = []
    for number, tool in enumerate(tools):
        function = tool["function"]
        strict = bool(function.get("strict"))
        rules.options = {"whitespace_pattern": whitespace, "lenient": not strict, "coerce_one_of": not strict}
        parameters = parameters_of(function.get("parameters"), f"tools[{number}].function.parameters")
        _check_names(form, function["name"], parameters)
        arguments = rules.arguments(f"t{number}", parameters)
        body = f"{rules.literal(function['name'] + form.call[1])} {arguments} {rules.literal(form.call[2])}"
        ones.append(rules.add(f"t{number}", body))
    rules.add("one", " | ".join(ones))
    more = (
        f"({rules.literal(form.between + form.call[0])} one){{0,{MOST_CALLS - 1}}}"
        if parallel and form.parallel
        else ""
    )
    begin = form.begin + form.call[0]
    rest = f"one {more} {rules.literal(form.end)}"
    if required:
        rules.add("start", f"{rules.literal(begin)} {rest}")
    else:
        _allow_text(rules, begin, rest)
    return "\n".join(["%llguidance {}", *rules.lines]) + "\n"


def _allow_text(rules: _Rules, begin: str, rest: str) -> None:
    mark = _MARK.match(begin)
    if rules.marks.begins_special(begin):
        rules.add("start", f"/{_TEXT}/ ({rules.literal(begin)} {rest})?")
    elif mark is None:  # nothing marks it: an answer that begins like a call is one
        first = re.escape(begin[:1])
        rules.add("text", f"/[^{first}]{_TEXT}/")
        rules.add("start", f'text | {rules.literal(begin)} {rest} | ""')
    else:
        rules.add("text", f"/{_TEXT}/")
        rules.add("head", f"/{_TEXT}/ {rules.marks.lark(mark.group())}", "[lazy]")
        rules.add("start", f"text | head {rules.literal(begin[mark.end() :])} {rest}")
