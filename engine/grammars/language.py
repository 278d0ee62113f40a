"""What a request may write becomes one text in llguidance's own language. Runs in a process that can be ended
(`checking`): a GBNF grammar is parsed by Python, a schema may be anything."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import msgspec

from engine.errors import InvalidRequestError
from engine.grammars.marks import PLAIN, Marks

if TYPE_CHECKING:
    from llguidance import LLParserLimits

    from engine.request import StructuredOutputsParams, Thinking

_ASCII = "dw"
r"""classes of a regular expression that mean ASCII, as xgrammar and JSON schemas have them: \d is no Arabic digit"""
FIELD = "structured_outputs"
LENIENT = '"strict": false'
"""as readers of JSON and of Python understand it"""

WHITESPACE = r"( |\n[ \t]{0,32})?"
"""between the parts of a JSON text: one space, or the end of a line and an indentation. Without a bound models go on
with whitespace for as long as they may."""


ANY_TEXT = "(?s:.*)"

_GBNF_RULE = re.compile(r"^\s*[\w-]+\s*::=", re.MULTILINE)


def parser_limits() -> LLParserLimits:
    """For the check and for the core: what one takes the other takes. Memory is bounded to about 100 MB a grammar, and
    objects to about 4000 optional properties, each of which is four items of a row."""
    from llguidance import LLParserLimits

    return LLParserLimits(max_lexer_states=50_000, max_items_in_row=20_000, verbose_errors=False)


def grammar_of(params: StructuredOutputsParams, marks: Marks = PLAIN) -> str:
    """`marks`: of the model's vocabulary. Raises `InvalidRequestError` for what cannot be said in that language; what
    is wrong in it, compiling finds."""
    answer = _grammar_of_answer(params)
    if params.thinking is None and params.alternative is None:
        return answer
    given = json.loads(answer) if answer.startswith("{") else {"grammars": [{"lark_grammar": answer}]}
    inner: list[dict[str, Any]] = given["grammars"]
    inner[0].setdefault("name", "answer")
    lines, choice = [], f"@{inner[0]['name']}"
    if params.alternative is not None:
        inner.append({"name": "alternative", "lark_grammar": params.alternative})
        choice = f"({choice} | @alternative)"
    if params.thinking is not None:
        lines = _thinking(params.thinking, marks)
        choice = f"thinking /[ \\n]{{0,4}}/ {choice}"
    first = {"name": "output", "lark_grammar": "\n".join([f"start: {choice}", *lines]) + "\n"}
    return json.dumps({"grammars": [first, *inner]}, ensure_ascii=False)


def _thinking(thinking: Thinking, marks: Marks) -> list[str]:
    """Rules for free text up to a mark. The whitespace that models write behind it is no part of it."""
    if thinking.budget is not None:
        lines = _bounded_thought(thinking, thinking.budget, marks)
    elif marks.begins_special(thinking.close):
        lines = [f"thought: /{ANY_TEXT}/ {marks.lark(thinking.close)}"]
    else:
        head, rest = marks.split_before_special(thinking.close)
        lines = [f"thought_text[lazy]: /{ANY_TEXT}/ {marks.lark(head)}", f"thought: thought_text {marks.lark(rest)}"]
    if thinking.open is None:
        return [*lines, "thinking: thought"]
    return [*lines, f"thinking: ({marks.lark(thinking.open)} thought){'' if thinking.required else '?'}"]


def _bounded_thought(thinking: Thinking, budget: int, marks: Marks) -> list[str]:
    """Raises `InvalidRequestError`. Spelled out, the mark is no part of the text either: its token alone ends it."""
    found = marks.first_token(thinking.close)
    if found is None:
        raise InvalidRequestError(
            f"{FIELD}.thinking.budget: this model's vocabulary has no token {thinking.close!r}, which a budget needs",
            FIELD,
        )
    token, mark, rest = found
    spelled = re.escape(mark).replace("/", r"\/")
    return [
        f"thought: thought_text <[{token}]> {marks.lark(rest)}",
        f"thought_text[max_tokens={budget}]: THOUGHT",
        f"THOUGHT: /{ANY_TEXT}/ & ~/{ANY_TEXT}{spelled}{ANY_TEXT}/",
    ]


def _grammar_of_answer(params: StructuredOutputsParams) -> str:
    from llguidance import LLMatcher, grammar_from, regex_to_lark

    try:
        if params.json is not None or params.json_object:
            return _of_json(params)
        if params.structural_tag is not None:
            return _of_tags(params)
        if params.regex is not None:
            return LLMatcher.grammar_from_lark(f"start: /{regex_to_lark(params.regex, _ASCII)}/")
        if params.choice is not None:
            return LLMatcher.grammar_from_regex("|".join(map(re.escape, params.choice)))
        if _GBNF_RULE.search(params.grammar or ""):
            return grammar_from("grammar", params.grammar or "")
        return LLMatcher.grammar_from_lark(params.grammar or "")
    except InvalidRequestError:
        raise
    except RecursionError:
        raise InvalidRequestError(f"{FIELD}: it nests too deep", FIELD) from None
    except (ValueError, AssertionError) as error:
        raise InvalidRequestError(f"{FIELD}: {first_line(str(error))}", FIELD) from None


def _of_json(params: StructuredOutputsParams) -> str:
    from llguidance import LLMatcher

    schema = {"type": "object"} if params.json is None else parsed(params.json, "json")
    schema = {} if schema is True else schema
    if not isinstance(schema, (dict, bool)):
        raise InvalidRequestError(f"{FIELD}.json: a JSON schema is an object, not {type(schema).__name__}", FIELD)
    if params.disable_additional_properties:
        schema = _closed(schema)
    if params.strict:
        _refuse_uncountable(schema)
    return LLMatcher.grammar_from_json_schema(json.dumps(schema, ensure_ascii=False), overrides=_options(params))


def _options(params: StructuredOutputsParams) -> Any:
    lenient = {"lenient": not params.strict, "coerce_one_of": not params.strict}
    if params.disable_any_whitespace:
        return {"whitespace_flexible": False, **lenient}
    return {"whitespace_pattern": params.whitespace_pattern or WHITESPACE, **lenient}


_VALUES = ("enum", "const", "default", "examples")
_SCHEMAS_BY_NAME = ("properties", "patternProperties", "$defs", "definitions", "dependentSchemas")


def _closed(schema: Any) -> Any:
    """Objects have no properties but those that their schema names."""
    if isinstance(schema, list):
        return [_closed(each) for each in schema]
    if not isinstance(schema, dict):
        return schema
    closed = {
        key: {name: _closed(each) for name, each in value.items()}
        if key in _SCHEMAS_BY_NAME and isinstance(value, dict)
        else value
        if key in _VALUES
        else _closed(value)
        for key, value in schema.items()
    }
    if isinstance(closed.get("properties"), dict):
        closed.setdefault("additionalProperties", False)
    return closed


def _refuse_uncountable(schema: Any) -> None:
    """llguidance counts a name that comes twice as two. Raises `InvalidRequestError`."""
    if isinstance(schema, list):
        for each in schema:
            _refuse_uncountable(each)
    if not isinstance(schema, dict):
        return
    least, required = schema.get("minProperties"), schema.get("required")
    distinct = len(set(map(str, required))) if isinstance(required, list) else 0
    is_open = schema.get("additionalProperties") is not False or bool(schema.get("patternProperties"))
    if is_open and isinstance(least, (int, float)) and least > max(distinct, 1):
        raise InvalidRequestError(
            f"{FIELD}: minProperties ({least}) cannot be enforced where names are open: one may come twice "
            f"({LENIENT} passes over that)",
            FIELD,
        )
    for key, value in schema.items():
        if key in _SCHEMAS_BY_NAME and isinstance(value, dict):
            for each in value.values():
                _refuse_uncountable(each)
        elif key not in _VALUES:
            _refuse_uncountable(value)


class Tag(msgspec.Struct, forbid_unknown_fields=True):
    begin: str
    schema: dict[str, Any]
    end: str


class Tags(msgspec.Struct, forbid_unknown_fields=True):
    """vLLM's and xgrammar's: free text, in which triggers begin structures."""

    type: str
    structures: list[Tag]
    triggers: list[str]

    @classmethod
    def of(cls, value: str | Mapping[str, Any] | None) -> Tags:
        """Raises `InvalidRequestError`."""
        try:
            return msgspec.convert(parsed(value, "structural_tag"), cls)
        except msgspec.ValidationError as error:
            form = '{"type": "structural_tag", "structures": [{"begin", "schema", "end"}], "triggers": [...]}'
            raise InvalidRequestError(f"{FIELD}.structural_tag: {error}; it reads {form}", FIELD) from None


def _of_tags(params: StructuredOutputsParams) -> str:
    from llguidance import StructTag

    tags = Tags.of(params.structural_tag)
    structures = []
    for tag in tags.structures:
        trigger = next((each for each in tags.triggers if each and tag.begin.startswith(each)), None)
        if trigger is None:
            raise InvalidRequestError(f"{FIELD}.structural_tag: no trigger begins {tag.begin!r}", FIELD)
        schema = _closed(tag.schema) if params.disable_additional_properties else tag.schema
        if params.strict:
            _refuse_uncountable(schema)
        schema = {**schema, "x-guidance": _options(params)}
        structures.append(StructTag(trigger=trigger, begin=tag.begin, grammar=schema, end=tag.end))
    return StructTag.to_grammar(structures, assume_special=False)


def parsed(value: str | Mapping[str, Any] | None, name: str) -> Any:
    if not isinstance(value, str):
        return value
    try:
        return json.loads(value)
    except ValueError as error:
        raise InvalidRequestError(f"{FIELD}.{name}: not JSON: {error}", FIELD) from None


def first_line(error: str) -> str:
    """Of llguidance's message, without the parser's state behind it."""
    return " ".join(error.partition("\n<")[0].split())[:500]
