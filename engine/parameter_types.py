"""What kinds of values the parameters of a request take. NumPy has numbers, too; what is of another kind is refused
by the parameter's name, because past here everybody counts on it."""

from __future__ import annotations

import operator
from collections.abc import Callable, Mapping, Sequence, Set
from typing import Any

from engine.errors import InvalidRequestError

_DIGITS, _BITS = 20, 64
"""of integers that are read, and shown"""


def integer(name: str, value: Any) -> int:
    """Raises `InvalidRequestError`, as the others do."""
    if type(value) is int:
        return value
    try:
        return operator.index(value)
    except TypeError:
        raise _not(name, "an integer", value) from None


def number(name: str, value: Any) -> float:
    if type(value) is float or type(value) is int:
        return value
    if not hasattr(value, "__float__"):
        raise _not(name, "a number", value)
    try:
        return float(value)
    except (TypeError, ValueError, OverflowError):
        raise _not(name, "a number", value) from None


def flag(name: str, value: Any) -> bool:
    if value is True or value is False:
        return value
    is_one = isinstance(value, int) or (type(value).__module__ == "numpy" and type(value).__name__ in ("bool", "bool_"))
    if not is_one or value not in (0, 1):
        raise _not(name, "true or false", value)
    return bool(value)


def early_stopping(name: str, value: Any) -> bool | str:
    return value if isinstance(value, str) and value == "never" else flag(name, value)


def integers(name: str, value: Any) -> list[int]:
    try:
        given = value.tolist() if hasattr(value, "tolist") else value  # of NumPy and torch
    except (RuntimeError, TypeError):  # a tensor without numbers
        given = None
    if isinstance(given, str | bytes) or not isinstance(given, Sequence | Set):
        raise _not(name, "a list of token ids", value)
    return [integer(f"{name}[{index}]", each) for index, each in enumerate(given)]


def texts(name: str, value: Any) -> list[str]:
    is_list = isinstance(value, Sequence) and not isinstance(value, str | bytes)
    if not is_list or not all(isinstance(each, str) for each in value):
        raise _not(name, "a list of strings", value)
    return list(value)


def text_or_texts(name: str, value: Any) -> str | list[str]:
    return value if isinstance(value, str) else texts(name, value)


def biases(name: str, value: Any) -> dict[int, float]:
    if not isinstance(value, Mapping):
        raise _not(name, "token ids with their biases", value)
    return {_token(name, token): number(name, bias) for token, bias in value.items()}


def _token(name: str, token: Any) -> int:
    """As JSON has them, too."""
    is_number = isinstance(token, str) and token.isdecimal() and len(token) <= _DIGITS
    return int(token) if is_number else integer(f"{name}: a token id", token)


def _not(name: str, kind: str, value: object) -> InvalidRequestError:
    is_short = isinstance(value, float | str) or (isinstance(value, int) and value.bit_length() <= _BITS)
    said = repr(value)[:80] if is_short else type(value).__name__
    return InvalidRequestError(f"{name} must be {kind}, got {said}", name.partition("[")[0].partition(":")[0])


Taken = Callable[[str, Any], Any]
SAMPLING: dict[str, Taken] = {
    **dict.fromkeys(("n", "best_of", "top_k", "seed", "max_tokens", "min_tokens"), integer),
    **dict.fromkeys(("logprobs", "prompt_logprobs", "truncate_prompt_tokens"), integer),
    **dict.fromkeys(("temperature", "top_p", "min_p", "length_penalty"), number),
    **dict.fromkeys(("repetition_penalty", "presence_penalty", "frequency_penalty"), number),
    **dict.fromkeys(("use_beam_search", "ignore_eos", "include_stop_str_in_output"), flag),
    **dict.fromkeys(("detokenize", "skip_special_tokens"), flag),
    **dict.fromkeys(("stop_token_ids", "allowed_token_ids"), integers),
    "early_stopping": early_stopping,
    "stop": text_or_texts,
    "bad_words": texts,
    "logit_bias": biases,
}
"""of `SamplingParams`"""
