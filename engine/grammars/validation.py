"""The process that says where an output does not keep its JSON schema (`engine.frontend.helpers`): under `strict=False`
a grammar passes over what it cannot enforce."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from typing import Any, NoReturn

import msgspec

from engine.grammars.language import Tags, parsed
from engine.request import StructuredOutputsParams

MAKE = "engine.grammars.validation:validator"
_MOST_CHARS = 300


class Written(msgspec.Struct):
    params: StructuredOutputsParams
    text: str


def has_schema(params: StructuredOutputsParams) -> bool:
    return params.json is not None or params.structural_tag is not None


def validator(setup: bytes) -> Callable[[bytes], bytes]:
    decode = msgspec.msgpack.Decoder(Written).decode

    def answer(question: bytes) -> bytes:
        asked = decode(question)
        return (schema_error(asked.params, asked.text) or "").encode()

    return answer


def schema_error(params: StructuredOutputsParams, text: str) -> str | None:
    """Where `text` does not keep the schemas of `params`, and how; None: it keeps them."""
    try:
        for schema, part in _parts(params, text):
            if (error := _broken(schema, part)) is not None:
                return error if len(error) <= _MOST_CHARS else f"{error[:_MOST_CHARS]}..."
    except RecursionError:
        return "it nests too deep to be validated"
    return None


def _parts(params: StructuredOutputsParams, text: str) -> Iterator[tuple[Any, str]]:
    """Schemas, and the texts that they are for."""
    if params.structural_tag is None:
        yield parsed(params.json, "json"), text
        return
    for tag in Tags.of(params.structural_tag).structures:
        for part in text.split(tag.begin)[1:]:
            yield tag.schema, part.partition(tag.end)[0]


def _broken(schema: Any, text: str) -> str | None:
    from jsonschema import Draft202012Validator, FormatChecker
    from jsonschema.exceptions import best_match
    from jsonschema.validators import validator_for
    from referencing import Registry
    from referencing.exceptions import Unresolvable

    try:
        value = json.loads(text, parse_constant=_refuse)
    except ValueError as error:
        return f"$: not JSON: {error}"
    kind = validator_for(schema, default=Draft202012Validator)
    # A registry that is empty fetches nothing.
    checks = kind(schema, registry=Registry(), format_checker=FormatChecker())
    try:
        found = best_match(checks.iter_errors(value))
    except Unresolvable as error:
        return f"$: its schema refers to what is not there: {error}"
    except Exception as error:
        return f"$: its schema cannot be validated: {type(error).__name__}: {error}"
    return None if found is None else f"{found.json_path}: {found.message}"


def _refuse(name: str) -> NoReturn:
    raise ValueError(f"{name} is no JSON")
