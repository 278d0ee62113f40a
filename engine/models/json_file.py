"""One reader of a model's JSON files, which come from anywhere: bounded, and every refusal names the file."""

from __future__ import annotations

import json
import os
import reprlib
import stat
from collections import Counter
from pathlib import Path

from engine.errors import ConfigError


def read_json_object(file: Path, largest_bytes: int) -> dict[str, object]:
    """Raises `ConfigError` where the file is larger, cannot be read, is no JSON object, or says a thing twice."""
    content = read_json_value(file, largest_bytes)
    if not isinstance(content, dict):
        raise ConfigError(f"{file}: holds {type(content).__name__}, not an object")
    return content


def read_json_value(file: Path, largest_bytes: int) -> object:
    """The same of any JSON."""
    try:
        with open(file, "rb", opener=_at_once) as opened:
            found = os.fstat(opened.fileno())
            if not stat.S_ISREG(found.st_mode):
                raise ConfigError(f"{file}: is not a file")
            if found.st_size > largest_bytes:
                raise ConfigError(f"{file}: has {found.st_size} bytes; at most {largest_bytes} are read of such a file")
            content: object = json.loads(opened.read(largest_bytes).decode("utf-8"), object_pairs_hook=_each_key_once)
    except RecursionError:
        raise ConfigError(f"{file}: cannot be read as JSON: it is nested too deeply") from None
    except ConfigError:
        raise
    except (OSError, ValueError) as error:
        why = error.strerror if isinstance(error, OSError) else error  # whose text names the file once more
        raise ConfigError(f"{file}: cannot be read as JSON: {why}") from error
    return content


def _at_once(file: str, flags: int) -> int:
    """Nobody waits for who might write to it."""
    return os.open(file, flags | os.O_NONBLOCK)


def shown(value: object) -> str:
    """A value of such a file in a message, which stays a line whatever the value is."""
    return _SHORT.repr(value)


def _each_key_once(pairs: list[tuple[str, object]]) -> dict[str, object]:
    found = dict(pairs)
    if len(found) != len(pairs):
        [(repeated, _)] = Counter(key for key, _ in pairs).most_common(1)
        raise ValueError(f"the key {shown(repeated)} stands there twice")
    return found


_SHORT = reprlib.Repr()
_SHORT.maxstring = _SHORT.maxother = 80
