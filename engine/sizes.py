"""Sizes in bytes as people write them."""

from __future__ import annotations

import re

from engine.errors import ConfigError

_SIZE = re.compile(r"(\d+(?:\.\d+)?)\s*([kmgt]?)(i?)b?", re.IGNORECASE)


def parse_size(text: int | str) -> int:
    """Bytes from 1073741824, "1073741824", "1GiB", "1.5 GB", "512M" ("Ki", "Mi" … count in 1024s, others in 1000s).
    Raises `ConfigError`."""
    if isinstance(text, int):
        return text
    match = _SIZE.fullmatch(text.strip())
    if match is None:
        raise ConfigError(f"cannot read {text!r} as a size; write bytes, or for example 512MiB, 4GiB, 1.5GB")
    number, letter, binary = match.groups()
    return int(float(number) * (1024 if binary else 1000) ** " kmgt".index(letter.lower() or " "))
