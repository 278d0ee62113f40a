"""What callers hand in as adapters."""

from __future__ import annotations

from collections.abc import Sequence

from engine.adapters.request import LoRARequest
from engine.errors import InvalidRequestError
from engine.frontend.texts import check_name, check_text
from engine.limits import Limits

FIELD = "lora_request"
_MOST_PATH = 4096
"""characters"""


def check_adapter(adapter: object, serves_adapters: bool, limits: Limits) -> LoRARequest:
    """Raises `InvalidRequestError`."""
    if not isinstance(adapter, LoRARequest):
        raise InvalidRequestError(f"{FIELD} must be a LoRARequest, got {type(adapter).__name__}", FIELD)
    if not serves_adapters:
        raise InvalidRequestError(f"{FIELD}: this engine serves no adapters (--enable-lora)", FIELD)
    number = adapter.lora_int_id
    if type(number) is not int or not 1 <= number < 1 << 63:
        raise InvalidRequestError(f"{FIELD}: lora_int_id must be at least 1", FIELD)
    check_name(adapter.lora_name, FIELD, limits)
    if len(path := check_text(adapter.lora_path, FIELD)) > _MOST_PATH:
        raise InvalidRequestError(f"{FIELD}: lora_path has {len(path)} characters, more than {_MOST_PATH}", FIELD)
    if len(version := check_text(adapter.version, FIELD)) > _MOST_PATH:
        raise InvalidRequestError(f"{FIELD}: version has {len(version)} characters, more than {_MOST_PATH}", FIELD)
    return adapter


def adapters_of(given: object, count: int) -> Sequence[LoRARequest | None]:
    """Of each of `count` prompts: `given` is one for all, one for each, or None. Raises `InvalidRequestError`."""
    if not isinstance(given, Sequence):
        return [given] * count  # type: ignore[list-item]  # what is none is refused with its request
    if len(given) != count:
        raise InvalidRequestError(f"{count} prompts but {len(given)} lora_requests", FIELD)
    return given
