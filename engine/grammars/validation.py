"""The process that says where an output does not keep its JSON schema (`engine.frontend.helpers`): under `strict=False`
a grammar passes over what it cannot enforce."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Iterator
from decimal import MAX_EMAX, MIN_EMIN, Decimal, DecimalException, localcontext
from functools import cache
from typing import Any, NoReturn, cast

import msgspec

from engine.grammars.language import Tag, Tags, parsed
from engine.request import StructuredOutputsParams

MAKE = "engine.grammars.validation:validator"
UNKNOWN = "not validated: "
"""how it begins if it cannot be told whether the schema is kept"""
_MOST_CHARS = 300
_MOST_DIGITS = 30
_PRECISION = 2000
"""digits in which numbers are compared"""
_FORMATS = frozenset(
    [
        "date-time",
        "date",
        "time",
        "duration",
        "email",
        "idn-email",
        "hostname",
        "idn-hostname",
        "ipv4",
        "ipv6",
        "uri",
        "uri-reference",
        "iri",
        "iri-reference",
        "uuid",
        "uri-template",
        "json-pointer",
        "relative-json-pointer",
        "regex",
    ]
)
"""JSON Schema's own; others say nothing"""


class _Exact(Decimal):
    """Shown as it is written."""

    __repr__ = Decimal.__str__


class Written(msgspec.Struct):
    params: StructuredOutputsParams
    text: str


def has_schema(params: StructuredOutputsParams) -> bool:
    return params.json is not None or params.structural_tag is not None


def validator(setup: bytes) -> Callable[[bytes], bytes]:
    sys.set_int_max_str_digits(0)  # an alarm bounds what it may take
    schema_error(StructuredOutputsParams(json={}), "{}")  # imports, before anybody waits
    decode = msgspec.msgpack.Decoder(Written).decode

    def answer(question: bytes) -> bytes:
        asked = decode(question)
        return (schema_error(asked.params, asked.text) or "").encode("utf-8", "backslashreplace")

    return answer


def schema_error(params: StructuredOutputsParams, text: str) -> str | None:
    """Where `text` does not keep the schemas of `params`, and how; None: it keeps them. See `UNKNOWN`."""
    error = None
    try:
        with localcontext(prec=_PRECISION, Emax=MAX_EMAX, Emin=MIN_EMIN):
            for schema, part in _parts(params, text):
                if (error := _broken(_exact(json.dumps(schema)), part)) is not None:
                    break
    except RecursionError:
        error = f"{UNKNOWN}it nests too deep"
    except DecimalException:
        error = f"{UNKNOWN}a number is beyond what can be compared"
    except Exception as wrong:  # a schema may be anything, and its validator is a library's
        error = f"{UNKNOWN}{type(wrong).__name__}: {wrong}"
    return error if error is None or len(error) <= _MOST_CHARS else f"{error[:_MOST_CHARS]}..."


def _parts(params: StructuredOutputsParams, text: str) -> Iterator[tuple[Any, str]]:
    """Schemas, and the texts that they are for."""
    text = text if params.thinking is None else params.thinking.behind(text)
    if params.structural_tag is None:
        yield parsed(params.json, "json"), text
        return
    tags, at = Tags.of(params.structural_tag).structures, 0
    while found := _next_tag(tags, text, at):
        tag, start = found
        try:  # what ends the tag, or begins another, may stand within a string
            at = json.JSONDecoder().raw_decode(text, start)[1]
        except ValueError:
            ends = text.find(tag.end, start) if tag.end else -1
            at = len(text) if ends < 0 else ends
        yield tag.schema, text[start:at]


def _next_tag(tags: list[Tag], text: str, at: int) -> tuple[Tag, int] | None:
    """The first that begins, of several the longest, and where what it holds begins."""
    places = [(place, -len(tag.begin), i) for i, tag in enumerate(tags) if (place := text.find(tag.begin, at)) >= 0]
    if not places:
        return None
    place, length, index = min(places)
    start = place - length
    return tags[index], start + len(text[start:]) - len(text[start:].lstrip(" \t\r\n"))


def _broken(schema: Any, text: str) -> str | None:
    from jsonschema import Draft202012Validator
    from jsonschema.exceptions import best_match
    from jsonschema.validators import validator_for
    from referencing import Registry

    try:
        value = _exact(text)
    except ValueError as error:
        return f"$: not JSON: {error}"
    kind = _with_unicode(validator_for(schema, default=Draft202012Validator))
    # A registry that is empty fetches nothing.
    checks = kind(schema, registry=Registry(), format_checker=kind.FORMAT_CHECKER)
    found = best_match(checks.iter_errors(value))
    if found is not None:
        return f"{found.json_path}: {found.message}"
    unchecked = sorted((_FORMATS & set(_formats(schema))) - set(kind.FORMAT_CHECKER.checkers))
    return f"{UNKNOWN}nothing here checks the format {unchecked[0]!r}" if unchecked else None


def _formats(schema: Any) -> Iterator[str]:
    """That it may mean: also one that stands within an example."""
    if isinstance(schema, dict):
        if isinstance(schema.get("format"), str):
            yield schema["format"]
        for value in schema.values():
            yield from _formats(value)
    elif isinstance(schema, list):
        for value in schema:
            yield from _formats(value)


@cache
def _with_unicode(kind: Any) -> Any:
    """Patterns as grammars read them: with classes of Unicode, which Python's own do not know."""
    import regex
    from jsonschema.exceptions import ValidationError
    from jsonschema.validators import extend

    def pattern(_: Any, wanted: str, value: Any, schema: Any) -> Iterator[ValidationError]:
        if isinstance(value, str) and not regex.search(wanted, value):
            yield ValidationError(f"{value!r} does not match {wanted!r}")

    def by_pattern(checks: Any, wanted: dict[str, Any], value: Any, schema: Any) -> Iterator[ValidationError]:
        for each, inner in wanted.items():
            for name in value if isinstance(value, dict) else ():
                if regex.search(each, name):
                    yield from checks.descend(value[name], inner, path=name, schema_path=each)

    def additional(checks: Any, wanted: Any, value: Any, schema: Any) -> Iterator[ValidationError]:
        patterns, named = schema.get("patternProperties", {}), schema.get("properties", {})
        for name in value if isinstance(value, dict) else ():
            if name not in named and not any(regex.search(each, name) for each in patterns):
                if wanted is False:
                    yield ValidationError(f"{name!r} is a property too many")
                elif wanted is not True:
                    yield from checks.descend(value[name], wanted, path=name)

    def integer(_: Any, value: Any) -> bool:
        whole = isinstance(value, Decimal) and cast(int, value.as_tuple().exponent) >= 0
        return whole or (isinstance(value, int) and not isinstance(value, bool))

    checker = kind.TYPE_CHECKER.redefine("integer", integer)
    keywords = {"pattern": pattern, "patternProperties": by_pattern, "additionalProperties": additional}
    return extend(kind, keywords, type_checker=checker)


def _exact(text: str) -> Any:
    """Numbers as they are written: 0.07 is a multiple of 0.01."""
    return json.loads(text, parse_float=_number, parse_constant=_refuse)


def _number(text: str) -> int | Decimal:
    number = _Exact(text)
    whole = number.adjusted() < _MOST_DIGITS and number == number.to_integral_value()
    return int(number) if whole else number


def _refuse(name: str) -> NoReturn:
    raise ValueError(f"{name} is no JSON")
