"""Which calls an answer may hold, in llguidance's Lark: for calls that are required, strict or one at most."""

from __future__ import annotations

import json
import keyword
import re
from collections.abc import Mapping, Sequence
from typing import Any

from msgspec.structs import replace

from engine.dialects.forms import CallForm, Tagged
from engine.dialects.schemas import parameters_of, types_of
from engine.errors import InvalidRequestError
from engine.grammars.marks import Marks

_MARK = re.compile(r'<[^<>\n]{2,}>|\[[A-Z_]+\]|<[a-z]+[ =][a-z="]*')
_PLACES = {
    "{n}": "/[0-9]{1,3}/",
    "{s}": r"/[ \n]{0,16}/",
    "{id}": "/[A-Za-z0-9]{9}/",
    "{and_id}": r'(", \"id\": \"" /[A-Za-z0-9_\-]{1,64}/ "\"")?',
}
_PLACE = re.compile(f"({'|'.join(map(re.escape, _PLACES))})")
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
        return " ".join(_PLACES.get(part) or self.marks.lark(part) for part in _PLACE.split(text))

    def json(self, schema: Any) -> str:
        return "%json " + json.dumps({**schema, "x-guidance": self.options}, ensure_ascii=False)

    def arguments(self, name: str, parameters: Mapping[str, Any]) -> str:
        tagged = self.form.arguments
        return self.json(parameters) if tagged is None else self._tagged(name, tagged, parameters, parameters)

    def _tagged(self, name: str, tagged: Tagged, parameters: Mapping[str, Any], root: Mapping[str, Any]) -> str:
        """Of two rules for each, one is for where nothing came before."""
        properties = (parameters.get("properties") or {}).items()
        required = set(parameters.get("required") or ())
        first = next_one = ""
        for number, (key, schema) in reversed(list(enumerate(sorted(properties) if tagged.in_order else properties))):
            item = self._item(f"{name}_{number}", tagged, key, schema, root)
            rules = []
            for kind, before in (("a", ""), ("b", self.marks.lark(tagged.joined))):
                there = f"{before} {item} {next_one}"
                rest = first if kind == "a" else next_one
                gone = "" if key in required else f" | {rest or chr(34) * 2}"
                rules.append(self.add(f"{name}_{number}{kind}", there + gone))
            first, next_one = rules
        return first

    def _item(self, name: str, tagged: Tagged, key: str, schema: Any, root: Mapping[str, Any]) -> str:
        schema = schema if isinstance(schema, Mapping) else {}
        head, _, tail = tagged.item.partition("{value}")
        is_text = json.dumps(_may_be_text(schema, root))
        head = self.literal(head.replace("{key}", key).replace("{text}", is_text))
        return f"{head} {self._value(name, tagged, key, schema, root, tail)}"

    def _value(
        self, name: str, tagged: Tagged, key: str, schema: Mapping[str, Any], root: Mapping[str, Any], tail: str
    ) -> str:
        """With what follows it."""
        behind = self.literal(tail)
        members = _members(schema)
        raw = not isinstance(tagged.texts, str) or tagged.texts == "raw"
        left, right = ("", "") if isinstance(tagged.texts, str) else (tagged.texts[0], tagged.texts[0])
        if members is not None and (raw or tagged.python):
            words = [_word(each, left, right, tagged.python) for each in members]
            choice = " | ".join(self.marks.lark(word) or '""' for some in words for word in some)
            return f"({choice}) {behind}"
        if raw and _may_be_text(schema, root):
            if schema.get("pattern") and not self.options["lenient"]:
                raise InvalidRequestError(
                    f"tools: {key!r}: this model writes texts as they are, where a pattern cannot be enforced (strict)",
                    "tools",
                )
            return f"{self.marks.lark(left)} {self._text_until(name, right + tail)}"
        if (kind := schema.get("type")) in ("boolean", "null") and (tagged.python or tagged.texts == "raw"):
            return f"({_PYTHON[kind] if tagged.python else f'{_PYTHON[kind]} | {_JSON[kind]}'}) {behind}"
        definitions = {word: root[word] for word in ("$defs", "definitions") if word in root}
        choices = [self.json({**schema, **definitions}), *self._others(name, tagged, schema, root)]
        return f"({' | '.join(choices)}) {behind}" if len(choices) > 1 else f"{choices[0]} {behind}"

    def _others(self, name: str, tagged: Tagged, schema: Mapping[str, Any], root: Mapping[str, Any]) -> list[str]:
        """What the family writes where JSON would do; nobody holds it to all that a strict schema says."""
        if tagged.nested is None or not self.options["lenient"] or name.count("_") > _DEEPEST:
            return []
        kind = schema.get("type")
        if kind == "string" and tagged.python and not set(schema) & _OF_TEXTS:
            return [_SINGLE_QUOTED]
        inner = replace(tagged, item=tagged.nested)
        if kind == "object" and schema.get("properties"):
            return [f'"{{" {self._tagged(name, inner, schema, root)} "}}"']
        if kind == "array" and isinstance(schema.get("items"), Mapping) and not set(schema) & _OF_LISTS:
            one = self.add(f"{name}_one", self._value(f"{name}_of", tagged, "items", schema["items"], root, ""))
            return [f'"[" ({one} ({self.marks.lark(tagged.joined)} {one})*)? "]"']
        return []

    def _text_until(self, name: str, end: str) -> str:
        if self.marks.begins_special(end):
            return f"/{_TEXT}/ {self.literal(end)}"
        place = _PLACE.search(end)
        fixed, more = (end, "") if place is None else (end[: place.start()], end[place.start() :])
        head, rest = self.marks.split_before_special(fixed)
        self.add(f"{name}_text", f"/{_TEXT}/ {self.marks.lark(head)}", "[lazy]")
        return f"{name}_text {self.literal(rest + more)}"


_DEEPEST = 4
"""lists and objects within arguments that are written as the family does"""
_SINGLE_QUOTED = r"/(?s:'([^'\\]|\\.)*')/"
_OF_TEXTS = {"pattern", "format", "minLength", "maxLength", "enum", "const"}
_OF_LISTS = {"minItems", "maxItems", "prefixItems", "uniqueItems", "contains"}
_PYTHON = {"boolean": '"True" | "False"', "null": '"None"'}
_JSON = {"boolean": '"true" | "false"', "null": '"null"'}


def _may_be_text(schema: Mapping[str, Any], root: Mapping[str, Any]) -> bool:
    kinds = types_of(schema, root)
    return not kinds or "string" in kinds


def _word(member: Any, left: str, right: str, python: bool) -> list[str]:
    """The ways in which a value is written."""
    if python:
        ways = [json.dumps(member, ensure_ascii=False), repr(member)] if isinstance(member, str) else [repr(member)]
        return list(dict.fromkeys(ways))
    return [left + member + right if isinstance(member, str) else json.dumps(member)]


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
