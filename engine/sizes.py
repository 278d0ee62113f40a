"""Sizes in bytes as people write them."""

from __future__ import annotations

import re

from engine.errors import ConfigError

_LONGEST = 40
"""characters"""
_SHOWN = {"KiB": 2**10, "MiB": 2**20, "GiB": 2**30}
_SIZE = re.compile(r"(\d+(?:\.\d+)?)\s*([kmgt]?)(i?)b?", re.IGNORECASE)


def parse_size(text: int | str) -> int:
    """Bytes from 1073741824, "1073741824", "1GiB", "1.5 GB", "512M" ("Ki", "Mi" … count in 1024s, others in 1000s).
    Raises `ConfigError`."""
    if isinstance(text, int) and not isinstance(text, bool):
        return text
    match = _SIZE.fullmatch(text.strip()) if isinstance(text, str) and len(text) <= _LONGEST else None
    if match is None:
        shown = repr(text)[:_LONGEST]
        raise ConfigError(f"cannot read {shown} as a size; write bytes, or for example 512MiB, 4GiB, 1.5GB")
    number, letter, binary = match.groups()
    return int(float(number) * (1024 if binary else 1000) ** " kmgt".index(letter.lower() or " "))


def setting_bytes(value: int | str, setting: str) -> int:
    """The same of a setting, which the `ConfigError` names."""
    try:
        return parse_size(value)
    except ConfigError as error:
        raise ConfigError(f"{setting}: {error}") from None


def size_text(size_bytes: int) -> str:
    """As `parse_size` reads it, never less than the size: 2MiB for 1,500,000."""
    unit = "KiB" if size_bytes < 2**20 else "MiB" if size_bytes < 2**34 else "GiB"
    return f"{-(-size_bytes // _SHOWN[unit])}{unit}"
