"""Under `strict=False` an output may break its schema: it is said where."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator
from typing import Any

import pytest

from engine.frontend.grammars import GrammarChecks
from engine.grammars.validation import schema_error
from engine.limits import Limits
from engine.request import CompletionOutput, FinishReason, SamplingParams, StructuredOutputsParams

UNIQUE = {"type": "array", "items": {"type": "integer"}, "uniqueItems": True}
CATASTROPHE = {"type": "string", "pattern": "^(a|a)*$"}


def lenient(**asked: Any) -> StructuredOutputsParams:
    return StructuredOutputsParams(strict=False, **asked)


def output(text: str, reason: FinishReason | None = "stop") -> CompletionOutput:
    return CompletionOutput(index=0, text=text, token_ids=[], finish_reason=reason)


@pytest.fixture
def checks() -> Iterator[GrammarChecks]:
    checks = GrammarChecks(Limits(grammar_s=1.0))
    yield checks
    checks.close()


@pytest.mark.parametrize(
    ("schema", "text", "says"),
    [
        (UNIQUE, "[1, 2]", None),
        (json.dumps(UNIQUE), "[1, 2, 1]", "$: [1, 2, 1] has non-unique elements"),
        (UNIQUE, "[1, 2", "$: not JSON"),
        (UNIQUE, "[NaN]", "$: not JSON: NaN"),
        ({"oneOf": [{"type": "integer"}, {"minimum": 3}]}, "4", "is valid under each of"),
        ({"properties": {"a": {"items": {"not": {"const": 1}}}}}, '{"a": [0, 1]}', "$.a[1]: "),
        ({"format": "ipv4", "type": "string"}, '"1.2.3"', "is not a 'ipv4'"),
        ({"$ref": "http://127.0.0.1:9/schema"}, "1", "not validated: _WrappedReferencingError"),
        ({"type": "integers"}, "1", "not validated: UnknownType"),
        ({"$id": 5}, "1", "not validated: "),
        ({"$schema": ["x"]}, "1", "not validated: "),
        ({"format": "date"}, '"2024-02-30"', "is not a 'date'"),
        ({"format": "time"}, '"12:30:00Z"', None),
        ({"multipleOf": 0.01}, "4.35", None),
        ({"multipleOf": 0.01}, "4.355", "is not a multiple of"),
        ({"type": "integer", "maximum": 2}, "1.0", None),
        ({"maximum": 0.1}, "1e400000000", "is greater than the maximum"),
        ({"pattern": "^\\p{L}+$"}, '"né"', None),
        ({"pattern": "^\\p{L}+$"}, '"n1"', "does not match"),
        ({"additionalProperties": {"const": 1}}, '{"\ud800": 2}', "1 was expected"),
        ({"$schema": "http://json-schema.org/draft-04/schema#", "minimum": 3, "exclusiveMinimum": True}, "3", "3"),
        ({"const": "x" * 1000}, '"y"', "xxx..."),
        ({"type": "integer"}, "1e40", None),
        ({"type": "integer"}, "1e-2", "is not of type 'integer'"),
        ({"type": "array"}, "1.25", "$: 1.25 is not of type 'array'"),
        ({"multipleOf": 3}, "1e40", "is not a multiple of 3"),
        ({"multipleOf": 0.5}, "1e40", None),
        ({"multipleOf": 3}, "1e4000", "not validated: a number is beyond"),
        ({"minimum": 1}, "1e99999999999999999999", "not validated: a number is beyond"),
        ({"patternProperties": {"^\\p{L}$": {"const": 1}}, "additionalProperties": False}, '{"é": 1}', None),
        ({"patternProperties": {"^\\p{L}$": {"const": 1}}}, '{"é": 2}', "1 was expected"),
        ({"patternProperties": {"^\\p{L}$": {}}, "additionalProperties": False}, '{"1": 2}', "'1' is a property too"),
        ({"properties": {"a": {}}, "additionalProperties": {"type": "string"}}, '{"a": 1, "b": 2}', "$.b: 2 is not"),
        ({"format": "json-pointer"}, '"{"', "is not a 'json-pointer'"),
        ({"format": "iri"}, '"{"', "is not a 'iri'"),
        ({"format": "date-time"}, '"2023-02-29T00:00:00Z"', "is not a 'date-time'"),
        ({"format": "of ours"}, '"x"', None),
        (True, "1", None),
        (False, "1", "False schema"),
        ({"type": "array"}, "[" * 100_000 + "]" * 100_000, "not validated: it nests too deep"),
    ],
)
def test_what_is_broken_is_named(schema: Any, text: str, says: str | None) -> None:
    params = lenient(json={} if isinstance(schema, bool) else schema)
    if isinstance(schema, bool):
        params = lenient(json=json.dumps(schema))
    error = schema_error(params, text)
    assert error is None if says is None else says in (error or "")


def test_each_tag_keeps_its_own_schema() -> None:
    tags = {
        "type": "structural_tag",
        "structures": [
            {"begin": "<a>", "schema": UNIQUE, "end": "</a>"},
            {"begin": "<b>", "schema": {"type": "integer"}, "end": "</b>"},
        ],
        "triggers": ["<"],
    }
    params = lenient(structural_tag=tags)
    assert schema_error(params, "so <a>[1, 2]</a> and <b>3</b>, <a>[]</a>") is None
    assert "non-unique" in (schema_error(params, "<b>3</b> <a>[1, 2]</a><a>[1, 1]</a>") or "")


def test_what_begins_and_ends_tags_may_stand_in_strings() -> None:
    text = {"type": "string"}
    structures = [
        {"begin": begin, "schema": text, "end": end} for begin, end in [("<a>", "</a>"), ("<a>b", ""), ("<c>", "")]
    ]
    params = lenient(structural_tag={"type": "structural_tag", "structures": structures, "triggers": ["<"]})
    assert schema_error(params, 'x <a> "</a> <c> <a>b" </a><a>b"1" <c>"<a>"') is None
    assert schema_error(params, 'x <a> "</a>" </a><a>b1 <c>"<a>"') == "$: 1 is not of type 'string'"
    assert "not JSON" in (schema_error(params, '<c>"') or "")


def test_a_format_that_nothing_checks_is_not_called_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    from jsonschema import Draft202012Validator

    checkers = dict(Draft202012Validator.FORMAT_CHECKER.checkers)
    del checkers["iri"]
    monkeypatch.setattr(Draft202012Validator.FORMAT_CHECKER, "checkers", checkers)
    schema = {"items": {"type": "string", "format": "iri"}}
    assert schema_error(lenient(json=schema), '["x"]') == "not validated: nothing here checks the format 'iri'"
    assert "not of type" in (schema_error(lenient(json=schema), "[1]") or "")


def test_what_has_ended_is_validated_once_and_told_again(checks: GrammarChecks) -> None:
    """Outputs that are cumulative show it until all samples have ended."""
    asked, told = SamplingParams(structured_outputs=lenient(json=UNIQUE)), dict[int, str | None]()
    for _ in range(2):
        one = output("[1, 1]")
        asyncio.run(checks.validate_async(asked, [(one, one.text)], told))
        assert one.schema_error == told[0] == "$: [1, 1] has non-unique elements"
    told[0] = "told before"
    asyncio.run(checks.validate_async(asked, [(one, one.text)], told))
    assert one.schema_error == "told before"


@pytest.mark.parametrize("asynchronous", [False, True])
def test_outputs_are_told_and_none_costs_more_than_its_time(checks: GrammarChecks, asynchronous: bool) -> None:
    def told(params: StructuredOutputsParams, *outputs: CompletionOutput, **more: Any) -> list[str | None]:
        asked, ended = SamplingParams(structured_outputs=params, **more), [(one, one.text) for one in outputs]
        for index, one in enumerate(outputs):
            one.index = index
        if asynchronous:
            asyncio.run(checks.validate_async(asked, ended, {}))
        else:
            checks.validate(asked, ended)
        return [one.schema_error for one in outputs]

    right, wrong = "[1]", "[1, 1]"
    assert told(lenient(json=UNIQUE), output(right), output(wrong)) == [
        None,
        "$: [1, 1] has non-unique elements",
    ]
    assert told(lenient(json=UNIQUE), output(wrong, "abort"), output(wrong, None)) == [None, None]
    assert told(StructuredOutputsParams(json=UNIQUE), output(wrong)) == [None], "a grammar that is strict is kept"
    assert told(lenient(regex="a"), output("b")) == [None]
    assert told(lenient(json=UNIQUE), output(""), detokenize=False) == [None], "there is no text"
    [says] = told(lenient(json=CATASTROPHE), output(json.dumps("a" * 40 + "b")))
    assert says is not None
    assert says.startswith("not validated: ")
    assert "grammar_s" in says
    assert told(lenient(json=UNIQUE), output(right)) == [None], "and the next is served"
