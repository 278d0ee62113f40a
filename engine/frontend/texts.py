"""What callers hand in as text is text: a string, in characters that UTF-8 can write, of a length that has a bound."""

from __future__ import annotations

from msgspec.structs import replace

from engine.errors import TOO_LONG, InvalidRequestError
from engine.limits import Limits
from engine.request import SamplingParams


def no_tokenizer(where: str) -> str:
    """Of a model that transformers makes an empty one for, by its config alone."""
    files = "no tokenizer.json, nor other files of one (--tokenizer names another place)"
    return f"this model has no tokenizer: {where} has {files}"


SHORTENS = ", or let it be cut (truncate_prompt_tokens)"
"""what is pooled"""


def check_text(text: object, field: str) -> str:
    """Raises `InvalidRequestError` for what is no string, or holds half of a surrogate pair."""
    if not isinstance(text, str):
        raise InvalidRequestError(f"{field} must be a string, got {type(text).__name__}", field)
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise InvalidRequestError(
            f"{field}: the character at {error.start} is half of a surrogate pair, which is no character", field
        ) from None
    return text


def too_many_tokens(
    count: int, max_model_len: int | None, field: str, *, generates: bool = True
) -> InvalidRequestError:
    """Of a prompt. OpenAI's words, which clients look for. `generates`: tokens are wanted behind it, else it is
    pooled."""
    most = f"; at most {(max_model_len or 0) - 1} leave room for one to generate" if generates else ""
    return InvalidRequestError(
        f"This model's maximum context length is {max_model_len} tokens (max_model_len). However, your {field} "
        f"resulted in {count} tokens{most}. Please reduce the length of the {field}{'' if generates else SHORTENS}.",
        field,
        TOO_LONG,
    )


def check_name(name: object, field: str, limits: Limits) -> str:
    """Of a request or a prefix. Raises `InvalidRequestError`."""
    text = check_text(name, field)
    if not text:
        raise InvalidRequestError(f"{field} must be a string that is not empty", field)
    limits.check("name_chars", len(text), field)
    return text


def check_params(params: object) -> SamplingParams:
    """A copy, which nobody changes any more. Raises `InvalidRequestError`."""
    if not isinstance(params, SamplingParams):
        raise InvalidRequestError(
            f"sampling_params must be SamplingParams, got {type(params).__name__}", "sampling_params"
        )
    checked = replace(params)  # which checks kinds and ranges anew: they may have changed since it was made
    for field, texts in (("stop", checked.stop_strings), ("bad_words", checked.bad_words or ())):
        for text in texts:
            check_text(text, field)
    return checked


def too_many_counted(count: int, most: int, field: str, limits: Limits) -> InvalidRequestError:
    """Of a text that need not fit the context."""
    flag = f"--limit contexts_translated={limits.contexts_translated}"
    return InvalidRequestError(f"{field}: {count} tokens; at most {most} are counted ({flag})", field, TOO_LONG)
