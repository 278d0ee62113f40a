"""Random JSON schemas whose outputs are short."""

from __future__ import annotations

import random
from typing import Any

WORDS = ("a", "id", "name", "kind", "ä b", 'q"uote', "n/a", "x-y")


def random_schema(rng: random.Random, depth: int = 0) -> dict[str, Any]:
    kinds = [_string, _string, _integer, _number, _constant, _choice]
    if depth < 3:
        kinds += [_object, _object, _object, _array, _any_of]
    schema = rng.choice(kinds if depth else [_object, _array, _any_of])(rng, depth)
    if rng.random() < 0.1:
        schema["description"] = "says nothing"
    return schema


def _string(rng: random.Random, depth: int) -> dict[str, Any]:
    shape: dict[str, Any] = rng.choice(
        [
            {"maxLength": rng.randrange(1, 9)},
            {"minLength": 2, "maxLength": 6},
            {"pattern": rng.choice(["^[a-z]{1,5}$", "^(ab|cd)*x$", "^[0-9]{4}-[0-9]{2}$", "^\\S{1,4}$"])},
            {"format": rng.choice(["date", "uuid", "ipv4"])},
        ]
    )
    return {"type": "string", **shape}


def _integer(rng: random.Random, depth: int) -> dict[str, Any]:
    low = rng.randrange(-100, 100)
    return {"type": "integer", "minimum": low, "maximum": low + rng.randrange(0, 5000)}


def _number(rng: random.Random, depth: int) -> dict[str, Any]:
    return {"type": "number", "minimum": -2.5, "exclusiveMaximum": rng.choice([0, 7.25, 1e4])}


def _constant(rng: random.Random, depth: int) -> dict[str, Any]:
    return rng.choice([{"type": "boolean"}, {"type": "null"}, {"const": {"x": [1, "é"]}}, {"const": -3.5}])


def _choice(rng: random.Random, depth: int) -> dict[str, Any]:
    return {"enum": rng.sample([*WORDS, 1, None, True, [], {"a": 1}], rng.randrange(1, 6))}


def _array(rng: random.Random, depth: int) -> dict[str, Any]:
    low = rng.randrange(0, 3)
    schema = {"type": "array", "items": random_schema(rng, depth + 1), "minItems": low, "maxItems": low + 2}
    if rng.random() < 0.2:
        schema |= {"prefixItems": [random_schema(rng, depth + 1)]}
    return schema


def _object(rng: random.Random, depth: int) -> dict[str, Any]:
    names = rng.sample(WORDS, rng.randrange(0, 5))
    schema: dict[str, Any] = {
        "type": "object",
        "properties": {name: random_schema(rng, depth + 1) for name in names},
        "required": [name for name in names if rng.random() < 0.6],
        "additionalProperties": False,
    }
    if rng.random() < 0.15:
        schema["additionalProperties"] = {"type": "integer", "minimum": 0, "maximum": 9}
    return schema


def _any_of(rng: random.Random, depth: int) -> dict[str, Any]:
    return {"anyOf": [random_schema(rng, depth + 1) for _ in range(rng.randrange(1, 4))]}
