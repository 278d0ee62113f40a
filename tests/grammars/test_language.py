"""What may be asked for, how it is written for the compiler, and what is refused, by name."""

from __future__ import annotations

import json
from typing import Any

import pytest
from llguidance import LLMatcher, LLTokenizer

from engine.errors import InvalidRequestError
from engine.grammars.checking import check
from engine.grammars.language import grammar_of, parser_limits
from engine.request import StructuredOutputsParams

BYTES = LLTokenizer("byte")
PERSON = {"type": "object", "properties": {"a": {"type": "integer"}, "b": {"type": "string"}}, "required": ["a"]}
TAGS = {
    "type": "structural_tag",
    "structures": [{"begin": "<f=x>", "schema": {"type": "object", "properties": {"n": {"type": "integer"}},
                                                 "required": ["n"]}, "end": "</f>"}],
    "triggers": ["<f="],
}  # fmt: skip


def takes(params: StructuredOutputsParams, text: str) -> bool:
    """The whole text is an output."""
    matcher = LLMatcher(BYTES, grammar_of(params), limits=parser_limits(), log_level=0)
    assert not matcher.is_error(), matcher.get_error()
    tokens = list(text.encode())
    return matcher.validate_tokens(tokens) == len(tokens) and matcher.consume_tokens(tokens) and matcher.is_accepting()


def params(**fields: Any) -> StructuredOutputsParams:
    return StructuredOutputsParams(**fields)


@pytest.mark.parametrize(
    ("asked", "good", "bad"),
    [
        (params(json=PERSON), ['{"a": 1}', '{"a":1,"b":"x"}', '{\n  "a": 1\n}'], ['{"b": "x"}', '{"a": "1"}', "1"]),
        (params(json=json.dumps(PERSON)), ['{"a": 1}'], ["{}"]),
        (params(json_object=True), ["{}", '{"x": [1, {"y": null}]}'], ["[]", "1"]),
        (params(regex="[a-c]{2}[0-9]+"), ["ab1", "cc123"], ["a1", "abx", "ab1 "]),
        (params(regex=r"\d{2}/[\d.]+ \w\D"), ["12/3.4 a!"], ["١٢/3 a!", "12/٣ a!", "12/3 éx", "12/3 a1"]),
        (params(choice=["yes", 'n"o', "né"]), ["yes", 'n"o', "né"], ["ye", "no", "yesno"]),
        (
            params(choice=["<|im_end|>x", "a b\n", "1+1", "\x7f", "#-&~/"]),
            ["<|im_end|>x", "a b\n", "1+1", "#-&~/"],
            ["x"],
        ),
        (params(choice=[f"item-{i}" for i in range(13000)]), ["item-7", "item-12999"], ["item-", "item-13000"]),
        (params(grammar='root ::= "a" b*\nb ::= "b" | "c"'), ["a", "abcb"], ["b", "ad"]),
        (params(grammar='start: "a" B+\nB: /[0-9]/'), ["a1", "a42"], ["a", "1"]),
        (params(structural_tag=TAGS), ["free", 'one <f=x>{"n": 1}</f> two'], ['<f=x>{"m": 1}</f>', "<f=y>"]),
        (params(structural_tag=json.dumps(TAGS)), ['<f=x>{"n":1}</f>'], ['<f=x>{"n":1}']),
    ],
)
def test_outputs_are_what_was_asked_for(asked: StructuredOutputsParams, good: list[str], bad: list[str]) -> None:
    assert [text for text in good if not takes(asked, text)] == []
    assert [text for text in bad if takes(asked, text)] == []


def test_whitespace_in_json_is_bounded_unless_asked_for_otherwise() -> None:
    assert takes(params(json=PERSON), '{ "a" : 1\n}')
    assert not takes(params(json=PERSON), '{  "a": 1}') and not takes(params(json=PERSON), '{\n\n"a": 1}')
    assert not takes(params(json=PERSON), "{\n" + 33 * " " + '"a": 1}')
    assert takes(params(json=PERSON, whitespace_pattern="[ ]{0,3}"), '{   "a": 1}')
    assert not takes(params(json=PERSON, disable_any_whitespace=True), '{"a": 1}')
    assert takes(params(json=PERSON, disable_any_whitespace=True), '{"a":1}')


def test_properties_that_nobody_named_can_be_forbidden() -> None:
    assert takes(params(json=PERSON), '{"a":1,"c":2}')
    assert not takes(params(json=PERSON, disable_additional_properties=True), '{"a":1,"c":2}')
    nested = {"type": "object", "properties": {"x": PERSON, "properties": {"const": {"properties": 1}}}}
    assert not takes(params(json=nested, disable_additional_properties=True), '{"x":{"a":1,"c":2}}')
    assert takes(params(json=nested, disable_additional_properties=True), '{"properties":{"properties":1}}')
    for name in ("default", "enum", "const", "examples"):
        inside = {"type": "object", "properties": {name: PERSON}, "required": [name]}
        assert not takes(params(json=inside, disable_additional_properties=True), f'{{"{name}":{{"a":1,"c":2}}}}')
    tag = {**TAGS, "structures": [{"begin": "<f>", "schema": PERSON, "end": "</f>"}], "triggers": ["<f>"]}
    for closed in (True, False):
        text = '<f>{"a":1,"c":2}</f>'
        assert takes(params(structural_tag=tag, disable_additional_properties=closed), text) is not closed


def test_lark_is_told_from_gbnf_by_how_rules_are_written() -> None:
    assert takes(params(grammar='?start: "a" | "b"'), "b") and not takes(params(grammar='?start: "a" | "b"'), "c")
    assert takes(params(grammar='root ::= "a" | b\nb ::= "b"'), "b")


def test_a_pydantic_model_is_its_schema() -> None:
    class Model:
        @staticmethod
        def model_json_schema() -> dict[str, object]:
            return {"enum": ["x"]}

    asked = params(json=Model)
    assert takes(asked, '"x"') and not takes(asked, '"y"')


@pytest.mark.parametrize(
    ("asked", "says"),
    [
        (params(json={"type": "object", "unevaluatedProperties": False}), "unevaluatedProperties"),
        (params(json="{"), "not JSON"),
        (params(json="[1]"), "not list"),
        (params(json={"$ref": "#"}), "no output"),
        (params(json={"type": "integer", "minimum": 5, "maximum": 4}), "minimum"),
        (params(json={"$ref": "https://example.com/x"}), "example.com"),
        (params(regex="(("), "unclosed group"),
        (params(grammar="garbage"), "Expected token"),
        (params(grammar="root ::= ("), "GBNF"),
        (params(grammar="start: missing"), "missing"),
        (params(structural_tag={"type": "structural_tag", "format": {}}), "structures"),
        (params(structural_tag={**TAGS, "triggers": ["<g"]}), "no trigger"),
        (params(structural_tag={**TAGS, "structures": []}), "empty"),
        (params(json=PERSON, whitespace_pattern="(("), "("),
        (params(grammar=f'start: "{"ab" * 9000}"'), "16384 bytes"),
        (params(choice=[""] * 3 + ["\x00"]), ""),
    ],
)
def test_what_cannot_be_served_is_refused_with_its_reason(asked: StructuredOutputsParams, says: str) -> None:
    answer = check(asked, BYTES)
    if not says:
        assert answer.error is None
        return
    assert answer.error is not None and answer.error.startswith("structured_outputs") and says in answer.error
    assert answer.error.count("structured_outputs") == 1 and "\n" not in answer.error


def test_an_object_may_have_thousands_of_optional_properties_and_one_that_has_too_many_is_refused() -> None:
    def optional(count: int) -> StructuredOutputsParams:
        return params(json={"type": "object", "properties": {f"p{i}": {"type": "integer"} for i in range(count)}})

    assert check(optional(1500), BYTES).error is None
    assert takes(optional(1500), '{"p1": 1, "p700": 2, "p1499": 3, "other": [4]}')
    refused = check(optional(6000), BYTES)
    assert refused.error is not None and "items" in refused.error


def test_one_of_is_read_as_any_of_where_asked() -> None:
    schema = {"oneOf": [{"type": "integer"}, {"type": "number", "minimum": 0}]}
    refused = check(params(json=schema), BYTES)
    assert refused.error is not None and "oneOf" in refused.error and '"strict": false' in refused.error
    assert check(params(json=schema, strict=False), BYTES).error is None
    disjoint = {"oneOf": [{"type": "integer"}, {"type": "string"}]}
    assert check(params(json=disjoint), BYTES).error is None


def test_what_a_schema_says_and_nobody_knows_is_passed_over_where_asked() -> None:
    answer = check(params(json={"type": "string", "unevaluatedProperties": False}, strict=False), BYTES)
    assert answer.error is None and any("unevaluatedProperties" in each for each in answer.warnings)


@pytest.mark.parametrize("fields", [{}, {"json": {}, "regex": "a"}, {"choice": []}, {"choice": [1]}])
def test_exactly_one_kind(fields: dict[str, Any]) -> None:
    with pytest.raises(InvalidRequestError) as caught:
        params(**fields)
    assert caught.value.field == "structured_outputs"


def _nested(levels: int) -> dict[str, Any]:
    schema: dict[str, Any] = {"type": "string"}
    for _ in range(levels):
        schema = {"type": "array", "items": schema}
    return schema


BOMBS = {
    "nested": params(json=_nested(400)),
    "repeated": params(regex="((a{1,1000}){1,1000}){1,1000}"),
    "minItems": params(json={"type": "array", "items": {"type": "integer"}, "minItems": 10**9}),
    "alternatives": params(json={"anyOf": [{"type": "object", "required": [f"k{i}"],
                                            "properties": {f"k{i}": {"type": "string"}}} for i in range(2000)]}),
    "intersections": params(json={"allOf": [{"type": "string", "pattern": f".*{c}.{{{n}}}"}
                                            for n, c in enumerate("abcdefghijklmnop")]}),
    "recursion": params(json={"$defs": {"a": {"anyOf": [{"$ref": "#/$defs/a"}, {"$ref": "#/$defs/a"}]}},
                              "$ref": "#/$defs/a"}),
    "left recursion": params(grammar='start: x\nx: x x | "a" | '),
    "properties": params(json={"type": "object", "properties": {f"p{i}": {"type": "string"} for i in range(20000)}}),
    "unknown GBNF": params(grammar="root ::= " + "(" * 5000 + ")" * 5000),
}  # fmt: skip


OPEN = {"type": "object", "additionalProperties": {"type": "integer"}}


@pytest.mark.parametrize(
    ("schema", "refused"),
    [
        ({**OPEN, "minProperties": 2}, True),
        ({"type": "array", "items": {**OPEN, "minProperties": 2}}, True),
        ({"properties": {"minProperties": {**OPEN, "minProperties": 3}}}, True),
        ({"type": "object", "patternProperties": {"^a$": {}}, "additionalProperties": False, "minProperties": 2}, True),
        ({**OPEN, "minProperties": 1}, False),
        ({**OPEN, "minProperties": 2, "required": ["a", "b"]}, False),
        ({"enum": [{"minProperties": 5}]}, False),
    ],
)
def test_names_are_not_counted_where_one_may_come_twice(schema: dict[str, Any], refused: bool) -> None:
    """llguidance would count it twice."""
    error = check(params(json=schema), BYTES).error
    assert (error is not None and "minProperties" in error) == refused, error
    assert check(params(json=schema, strict=False), BYTES).error is None


@pytest.mark.parametrize("bomb", BOMBS)
def test_a_bomb_is_refused_or_harmless(bomb: str) -> None:
    """In this process: the bounds on what a grammar may cost are the compiler's own."""
    answer = check(BOMBS[bomb], BYTES)
    assert answer.error is None or "structured_outputs" in answer.error
