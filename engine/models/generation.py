"""Sampling that a model's authors recommend (generation_config.json, GGUF metadata), and what replaces it.

Used wherever a request leaves a value out. The user's `override_generation_config` goes before the files.
"""

from __future__ import annotations

from collections.abc import Mapping

from engine.errors import ConfigError
from engine.limits import RANGES
from engine.models.json_file import shown

_PARAMETERS = {
    "temperature": "temperature",
    "top_k": "top_k",
    "top_p": "top_p",
    "min_p": "min_p",
    "repetition_penalty": "repetition_penalty",
    "max_new_tokens": "max_tokens",
}
"""generation_config.json's name → the sampling parameter's"""
_WHOLE = ("top_k", "max_new_tokens")
_READ = (*_PARAMETERS, "do_sample")

Recommended = dict[str, bool | int | float]


def generation_defaults(generation: Mapping[str, object]) -> Recommended:
    """Of what a file holds, what concerns sampling; null says nothing. Raises `ConfigError` naming the key."""
    found: Recommended = {}
    for key in _READ:
        value = generation.get(key)
        if value is not None:
            found[key] = _flag(key, value) if key == "do_sample" else _number(key, value)
    return found


def overridden(recommended: Mapping[str, bool | int | float], override: Mapping[str, object]) -> Recommended:
    """`override` before what the files recommend, all of it in the ranges that requests must keep to.

    Raises `ConfigError` naming the key.
    """
    unknown = [key for key in override if key not in _PARAMETERS]
    if unknown:
        raise ConfigError(
            f"override_generation_config: there is no {shown(unknown[0])}; what it may set is {', '.join(_PARAMETERS)}"
        )
    merged = dict(recommended)
    for key, parameter in _PARAMETERS.items():
        if key in override:
            try:
                merged[key] = _number(key, override[key])
            except ConfigError as error:
                raise ConfigError(f"override_generation_config: {error}") from None
        if key in merged and not RANGES[parameter].holds(merged[key]):
            where = "override_generation_config: " if key in override else "the model's recommended "
            raise ConfigError(
                f"{where}{key} must be in {RANGES[parameter]}, found {shown(merged[key])}"
                + ("" if key in override else "; set another with override_generation_config")
            )
    return merged


def _number(key: str, value: object) -> int | float:
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise ConfigError(f"{key} must be a number, found {shown(value)}")
    if key not in _WHOLE:
        return value
    if value != value or value in (float("inf"), float("-inf")) or value != int(value):
        raise ConfigError(f"{key} must be a whole number, found {shown(value)}")
    return int(value)


def _flag(key: str, value: object) -> bool:
    if not isinstance(value, bool):
        raise ConfigError(f"{key} must be true or false, found {shown(value)}")
    return value
