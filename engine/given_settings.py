"""Settings that are objects, as they are given: read into their structs, or refused with what they may be."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any, Literal, TypeVar, get_args, get_origin, get_type_hints

import msgspec

from engine.errors import ConfigError

T = TypeVar("T", bound=msgspec.Struct)


def read_setting(name: str, given: Mapping[str, Any], kind: type[T]) -> T:
    """Raises `ConfigError` naming the setting, the field, and what may stand there."""
    try:
        return msgspec.convert(dict(given), kind)
    except msgspec.ValidationError as error:
        path = re.findall(r"[.](\w+)", str(error).rpartition(" - at ")[2])
        values = _values(kind, path) if str(error).startswith("Invalid enum value") else ()
        may = (
            f"it may be {' or '.join(map(repr, values))}"
            if values
            else f"it may have {', '.join(kind.__struct_fields__)}"
        )
        raise ConfigError(f"{name}: {error}; {may}") from None


def _values(kind: Any, path: list[str]) -> tuple[Any, ...]:
    """Of the literals in a field's type, by the names on the way to it."""
    for field in path:
        struct = next(
            (each for each in _parts(kind) if isinstance(each, type) and issubclass(each, msgspec.Struct)), None
        )
        kind = None if struct is None else get_type_hints(struct).get(field)
    return tuple(value for each in _parts(kind) if get_origin(each) is Literal for value in get_args(each))


def _parts(kind: Any) -> list[Any]:
    """A type and all that it is made of."""
    return [kind, *(part for each in get_args(kind) for part in _parts(each))]
