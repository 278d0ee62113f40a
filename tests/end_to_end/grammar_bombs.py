"""Grammars that somebody might send to take the engine down: wide, deep, long, ambiguous, or small and exponential.
Each is refused or served, beside streams that notice nothing (`tools/bench_grammar_bombs.py` measures it)."""

from __future__ import annotations

import json
from typing import Any

from engine.request import StructuredOutputsParams

_STRING = {"type": "string"}


def _nested(levels: int) -> dict[str, Any]:
    schema: dict[str, Any] = _STRING
    for _ in range(levels):
        schema = {"type": "array", "items": schema}
    return schema


def _laughs(levels: int) -> dict[str, Any]:
    """Each definition is two of the next."""
    pair = [{"type": "array", "prefixItems": [{"$ref": f"#/$defs/d{i + 1}"}] * 2, "minItems": 2} for i in range(levels)]
    return {"$defs": {**{f"d{i}": each for i, each in enumerate(pair)}, f"d{levels}": _STRING}, "$ref": "#/$defs/d0"}


def _objects(count: int) -> list[dict[str, Any]]:
    return [{"type": "object", "required": [f"k{i}"], "properties": {f"k{i}": _STRING}} for i in range(count)]


def _optional(count: int) -> dict[str, Any]:
    return {"type": "object", "properties": {f"p{i}": _STRING for i in range(count)}}


def _doubled(levels: int, form: str, last: str) -> str:
    """`form`: of a rule that is two of the next, by their numbers."""
    return "\n".join([*(form.format(i, i + 1) for i in range(levels)), last.format(levels)])


def _tags(count: int, schema: dict[str, Any]) -> dict[str, Any]:
    structures = [{"begin": f"<f{i}>", "schema": schema, "end": "</f>"} for i in range(count)]
    return {"type": "structural_tag", "structures": structures, "triggers": ["<f"]}


_SCHEMAS: dict[str, Any] = {
    "nested arrays": _nested(100),
    "nested too deep": _nested(2000),
    "nested as text": "[" * 100_000,
    "a million items": {"type": "array", "items": {"type": "integer"}, "minItems": 10**6},
    "a billion items": {"type": "array", "items": {"type": "integer"}, "minItems": 10**9},
    "items in items": {"type": "array", "minItems": 1000, "items": {"type": "array", "minItems": 1000, "items": True}},
    "long strings": {"type": "string", "minLength": 10**6, "maxLength": 10**9},
    "alternatives": {"anyOf": _objects(2000)},
    "one of many": {"oneOf": [{"type": "integer", "minimum": i, "maximum": i + 5} for i in range(500)]},
    "intersections": {"allOf": [{"type": "string", "pattern": f".*{c}.{{{n}}}"}
                                for n, c in enumerate("abcdefghijklmnop")]},
    "recursion": {"$defs": {"a": {"anyOf": [{"$ref": "#/$defs/a"}, {"$ref": "#/$defs/a"}]}}, "$ref": "#/$defs/a"},
    "recursion that ends": {"type": "object", "properties": {"l": {"$ref": "#"}, "r": {"$ref": "#"}}},
    "recursion through allOf": {"allOf": [{"$ref": "#"}, {"type": "object"}]},
    "laughs": _laughs(40),
    "many properties": _optional(5000),
    "optional properties": _optional(700),
    "pattern properties": {"type": "object", "patternProperties": {f"^{'a' * i}.*b$": _STRING for i in range(60)}},
    "enum": {"enum": [f"{i * 7919 % 20011}-value" for i in range(10_000)]},
    "enum of objects": {"enum": [{"k": [i, {"x": "y" * 20}]} for i in range(3000)]},
    "long constant": {"const": "é\n\"" * 30_000},
    "numbers": {"type": "number", "minimum": -1e308, "maximum": 1e308, "multipleOf": 1e-300},
    "integers": {"type": "integer", "minimum": 10**300, "maximum": 10**301, "multipleOf": 997},
    "multiples": {"type": "integer", "multipleOf": 1_000_003},
    "pattern": {"type": "string", "pattern": "^(([a-z])+.)+[A-Z]([a-z])+$"},
    "negations": {"not": {"not": {"not": {"type": "object"}}}},
    "keywords": {"type": "string", **{f"unknown{i}": i for i in range(2000)}},
}  # fmt: skip
_REGEXES = {
    "counted": "a{1,100000}",
    "counted thrice": "((a{1,1000}){1,1000}){1,1000}",
    "counted classes": r"\p{L}{1,5000}",
    "stars in stars": "((a*)*)*b",
    "alternatives that are the same": "(a|a|a|a)*b",
    "states": "(a|b)*a(a|b){24}",
    "states of many": r"(.*[ab].{12}){3}",
    "anything before": r".*.*.*.*.*=.*.*.*.*.*",
    "back reference": r"(a+)\1",
    "look ahead": "(?=a)(?!b)a*",
    "groups": "(" * 20_000 + "a" + ")" * 20_000,
    "words": "|".join(f"{i:x}.*{i:o}" for i in range(2000)),
}
_GRAMMARS = {
    "left recursion": 'root ::= root "a" | root root | ""',
    "left recursion in Lark": 'start: x\nx: x x | "a" | ',
    "itself": "start: start",
    "each other": "start: a\na: b\nb: a",
    "ambiguous": 'start: e\ne: e e e e | e e e | e e | "a" | "aa" | "aaa"',
    "parentheses": "root ::= " + "(" * 5000 + ")" * 5000,
    "rules that double": _doubled(40, "r{0}: r{1} r{1}", 'r{0}: "a"\nstart: r0'),
    "terminals that double": _doubled(40, "T{0}: T{1} T{1}", 'T{0}: "a"\nstart: T0'),
    "GBNF that doubles": _doubled(40, "r{0} ::= r{1} r{1}", 'r{0} ::= "a"\nroot ::= r0'),
    "counted rules": 'start: x{100000}\nx: "a" | "b" | x "c"',
    "terminals that meet": "start: T\nT: /.*a.{18}/ & /.*b.{17}/ & ~/.*c.{16}/",
    "lazy ones": "start: x*\nx: " + " | ".join(f"/.*a{i}/" for i in range(400)),
    "empty ones": "start: a* b*\na: b*\nb: a* | ",
    "schema inside": f"start: x*\nx: %json {json.dumps(_laughs(30))}",
    "long text": f'start: "{"ab" * 60_000}"',
    "nothing": "",
    "not characters": 'root ::= [^\\x00-\\U0010FFFF] "\\xff"',
}
_CHOICES = {
    "choices": [f"{i * 7919 % 16381:05d}" * 3 for i in range(16_000)],
    "choices with one beginning": ["a" * i for i in range(1, 700)],
    "odd choices": ["", "\x00", "\\", "|", "(", "</s>", "\ud800"],
}


BOMBS: dict[str, StructuredOutputsParams] = {
    **{name: StructuredOutputsParams(json=given) for name, given in _SCHEMAS.items()},
    **{f"regex: {name}": StructuredOutputsParams(regex=given) for name, given in _REGEXES.items()},
    **{f"grammar: {name}": StructuredOutputsParams(grammar=given) for name, given in _GRAMMARS.items()},
    **{name: StructuredOutputsParams(choice=given) for name, given in _CHOICES.items()},
    "spaces": StructuredOutputsParams(json=_optional(3), whitespace_pattern=r"((\s{0,1000}){0,1000}){0,1000}"),
    "lenient": StructuredOutputsParams(json={"oneOf": _objects(500), "if": True, "then": False}, strict=False),
    "closed": StructuredOutputsParams(json=_nested(90), disable_additional_properties=True),
    "tags": StructuredOutputsParams(structural_tag=_tags(500, _optional(3))),
    "a tag that laughs": StructuredOutputsParams(structural_tag=_tags(3, _laughs(30))),
}
