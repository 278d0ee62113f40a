"""Numbers of GGUF metadata, within the bounds of what a model may be."""

from __future__ import annotations

from engine.errors import WeightsError
from engine.models.bounds import CONFIG_RANGES, GGUF_RANGES
from engine.models.gguf_header import GgufHeader
from engine.models.json_file import shown


def required(header: GgufHeader, key: str) -> int:
    value = header.integer(key)
    if value is None:
        found = header.metadata.get(key)
        reason = "is missing" if found is None else f"is not one integer ({shown(found)})"
        raise WeightsError(f"{header.path}: metadata {key} {reason}")
    allowed = GGUF_RANGES[key.partition(".")[2]]
    if not allowed.holds(value):
        raise WeightsError(f"{header.path}: metadata {key} must be in {allowed}, found {shown(value)}")
    return value


def optional(header: GgufHeader, key: str) -> int | None:
    """0 stands for "not set" in some files."""
    return required(header, key) if header.metadata.get(key) else None


def number(header: GgufHeader, key: str, name: str) -> float | None:
    """`name`: what Hugging Face's configs call it; 0 stands for "not set"."""
    found = header.metadata.get(key) or None
    if found is None:
        return None
    value, allowed = header.number(key), CONFIG_RANGES[name]
    if value is None or not allowed.holds(value):
        raise WeightsError(f"{header.path}: metadata {key} must be a number in {allowed}, found {shown(found)}")
    return value
