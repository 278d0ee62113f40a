"""What an answer must be, as OpenAI's, vLLM's and llama.cpp's clients write it."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import msgspec
from pydantic import BaseModel

from engine.errors import InvalidRequestError
from engine.request import StructuredOutputsParams

_ENGINES = "structured_outputs"


class StructuredFields(BaseModel):
    """One of them, or none."""

    response_format: dict[str, Any] | None = None
    """OpenAI's; ``{"type": "json_object", "schema": …}`` is llama.cpp's"""
    structured_outputs: dict[str, Any] | None = None
    """vLLM's: `StructuredOutputsParams`"""
    guided_json: str | dict[str, Any] | bool | None = None
    guided_regex: str | None = None
    guided_choice: list[str] | None = None
    guided_grammar: str | None = None
    guided_whitespace_pattern: str | None = None
    grammar: str | None = None
    """llama.cpp's"""
    json_schema: dict[str, Any] | None = None
    """llama.cpp's"""

    def structure(self) -> tuple[str | None, StructuredOutputsParams | None]:
        """And the field that says so. Raises `InvalidRequestError`."""
        given = [(name, read) for name, read in _READERS.items() if getattr(self, name) is not None]
        found: list[tuple[str, StructuredOutputsParams]] = []
        for name, read in given:
            with blamed_on(name):
                params = read(getattr(self, name))
            if params is not None:
                found.append((name, params))
        if len(found) > 1:
            (first, _), (second, _), *_ = found
            raise InvalidRequestError(f"{second} and {first} both say what the answer must be: give one", second)
        if not found:
            return None, None
        name, params = found[0]
        if self.guided_whitespace_pattern is not None and params.whitespace_pattern is None:
            params = msgspec.structs.replace(params, whitespace_pattern=self.guided_whitespace_pattern)
        return name, params


@contextmanager
def blamed_on(field: str | None, engines: str = _ENGINES) -> Iterator[None]:
    """The client's name in place of the engine's, where that is at fault."""
    try:
        yield
    except InvalidRequestError as error:
        if field is None or error.field != engines:
            raise
        reason = str(error)
        text = field + reason.removeprefix(engines) if reason.startswith(engines) else f"{field}: {reason}"
        raise InvalidRequestError(text, field, error.code) from error


def _response_format(given: dict[str, Any]) -> StructuredOutputsParams | None:
    kind = given.get("type")
    if kind == "text":
        return None
    if kind == "json_object":
        schema = given.get("schema")
        return StructuredOutputsParams(json_object=True) if schema is None else _lenient(schema)
    if kind == "json_schema":
        inner = given.get("json_schema")
        if not isinstance(inner, dict):
            raise InvalidRequestError(f"{_ENGINES}.json_schema must be an object that holds a schema", _ENGINES)
        schema = inner.get("schema", {})
        return StructuredOutputsParams(json=_schema(schema)) if inner.get("strict") is True else _lenient(schema)
    if kind == "structural_tag":
        return StructuredOutputsParams(structural_tag=given)
    raise InvalidRequestError(
        f"{_ENGINES}.type must be text, json_object, json_schema or structural_tag, got {str(kind)[:40]!r}",
        _ENGINES,
    )


def _lenient(schema: object) -> StructuredOutputsParams:
    """What the grammar cannot enforce is left out, and looked at when the answer is there."""
    return StructuredOutputsParams(json=_schema(schema), strict=False)


def _schema(schema: object) -> dict[str, Any] | str:
    if isinstance(schema, bool):
        return "true" if schema else "false"
    if not isinstance(schema, (dict, str)):
        raise InvalidRequestError(f"a JSON schema is an object, got {type(schema).__name__}", _ENGINES)
    return schema


def _structured_outputs(given: dict[str, Any]) -> StructuredOutputsParams | None:
    present = {name: value for name, value in given.items() if value is not None}
    if isinstance(present.get("json"), bool):
        present["json"] = _schema(present["json"])
    try:
        return msgspec.convert(present, StructuredOutputsParams) if present else None
    except msgspec.ValidationError as error:
        raise InvalidRequestError(f"{_ENGINES}: {error}", _ENGINES) from error


_READERS: dict[str, Callable[[Any], StructuredOutputsParams | None]] = {
    "response_format": _response_format,
    "structured_outputs": _structured_outputs,
    "guided_json": lambda given: StructuredOutputsParams(json=_schema(given)),
    "guided_regex": lambda given: StructuredOutputsParams(regex=given),
    "guided_choice": lambda given: StructuredOutputsParams(choice=given),
    "guided_grammar": lambda given: StructuredOutputsParams(grammar=given),
    "grammar": lambda given: StructuredOutputsParams(grammar=given) if given else None,
    "json_schema": _lenient,
}
