"""What schemas say of arguments, as far as texts of a model are read and held to it. Schemas come from anybody."""

from __future__ import annotations

import ast
import json
from collections.abc import Mapping, Sequence
from typing import Any

from engine.errors import InvalidRequestError

_DEEPEST = 8
_ANY = ["string"]
_KINDS = {
    str: "string",
    bool: "boolean",
    int: "integer",
    float: "number",
    type(None): "null",
    dict: "object",
    list: "array",
}


def types_of(schema: Any, root: Mapping[str, Any], depth: int = 0) -> list[str]:
    """All that a value may be; empty: nothing is said. References lead into `root`."""
    if not isinstance(schema, Mapping) or depth > _DEEPEST:
        return []
    declared = schema.get("type")
    if isinstance(declared, str):
        return [declared]
    if isinstance(declared, list):
        return [each for each in declared if isinstance(each, str)]
    members = schema.get("enum", [schema["const"]] if "const" in schema else None)
    if isinstance(members, list):
        return list(dict.fromkeys(_KINDS[type(each)] for each in members if type(each) in _KINDS))
    inner = [_target(schema["$ref"], root)] if "$ref" in schema else []
    for word in ("anyOf", "oneOf", "allOf"):
        choices = schema.get(word)
        inner += choices if isinstance(choices, list) else []
    found = [types_of(each, root, depth + 1) for each in inner]
    return list(dict.fromkeys(kind for kinds in found for kind in kinds)) if all(found) else []


def _target(reference: Any, root: Mapping[str, Any]) -> Any:
    if not isinstance(reference, str) or not reference.startswith("#/"):
        return None
    found: Any = root
    for step in reference[2:].split("/"):
        found = found.get(step.replace("~1", "/").replace("~0", "~")) if isinstance(found, Mapping) else None
    return found


def kinds_of(tool: Mapping[str, Any]) -> dict[str, list[str]]:
    """All that each argument may be, as far as anything is said of it."""
    parameters = tool["function"].get("parameters")
    properties = parameters.get("properties") if isinstance(parameters, Mapping) else None
    if not isinstance(parameters, Mapping) or not isinstance(properties, Mapping):
        return {}
    return {key: types_of(each, parameters) for key, each in properties.items()}


def typed(tool: Mapping[str, Any]) -> dict[str, Any]:
    """For the library, which looks at types and `anyOf` alone."""
    function = tool["function"]
    parameters = function.get("parameters")
    properties = parameters.get("properties") if isinstance(parameters, Mapping) else None
    if not isinstance(parameters, Mapping) or not isinstance(properties, Mapping):
        return {"type": "function", "function": {"name": function["name"]}}
    # A text that says nothing else is tried last.
    kinds = {key: sorted(each, key="string".__eq__) for key, each in kinds_of(tool).items()}
    shown = {"type": "object", "properties": {key: {"type": each} for key, each in kinds.items()}}
    return {"type": "function", "function": {"name": function["name"], "parameters": shown}}


def as_declared(arguments: str, kinds: Mapping[str, Sequence[str]]) -> str:
    """Texts where schemas know none, as the JSON or Python that they hold, if that is of a kind in question.
    `arguments`: of a call, which are no JSON where the model writes them."""
    found = json.loads(arguments)
    wrong = {key for key, each in found.items() if isinstance(each, str) and "string" not in (kinds.get(key) or _ANY)}
    if not wrong:
        return arguments
    shown = {key: _read(each, kinds[key]) if key in wrong else each for key, each in found.items()}
    return arguments if shown == found else json.dumps(shown, ensure_ascii=False)


def _read(text: str, kinds: Sequence[str]) -> Any:
    for read in (json.loads, ast.literal_eval):
        try:
            found = read(text)
        except (ValueError, SyntaxError, RecursionError, MemoryError, TypeError):
            continue
        kind = _KINDS.get(type(found), "")
        if kind in kinds or (kind == "integer" and "number" in kinds):
            return found
    return text


def parameters_of(parameters: Any, where: str, field: str = "tools") -> dict[str, Any]:
    """Raises `InvalidRequestError` where they are no schema of an object that one can go through."""
    if not parameters:
        return {"type": "object", "properties": {}}
    if not isinstance(parameters, Mapping) or parameters.get("type", "object") != "object":
        raise InvalidRequestError(f"{where} must be a JSON schema of an object", field)
    properties, required = parameters.get("properties") or {}, parameters.get("required") or []
    if not isinstance(properties, Mapping):
        raise InvalidRequestError(f"{where}.properties must be an object", field)
    if not isinstance(required, list) or not all(isinstance(each, str) for each in required):
        raise InvalidRequestError(f"{where}.required must be a list of names", field)
    return {"type": "object", **parameters}
