"""What vLLM's `LLM` takes beside what ours does: shapes that are translated, calls that are refused."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NoReturn

import msgspec

from engine.errors import InvalidRequestError
from engine.frontend.admission import ParsedPrompt, Prompt, parse_prompts

_PARAMETERS = {
    "mm_processor_kwargs": "only text is read",
    "prompt_adapter_request": "adapters are not supported yet",
    "tokenization_kwargs": "use SamplingParams(truncate_prompt_tokens=...), or tokenize before",
    "trace_headers": "requests are not traced",
}


def refuse(**given: object) -> None:
    """Raises `InvalidRequestError` for parameters that are set, and mean nothing here."""
    for name, value in given.items():
        if value:
            raise InvalidRequestError(f"{name} is refused: {_PARAMETERS[name]} (vLLM's parameter)", name)


def with_token_ids(
    prompts: Prompt | Sequence[Prompt] | None, token_ids: Sequence[int] | Sequence[Sequence[int]] | None
) -> list[ParsedPrompt]:
    """`token_ids`: of a prompt, or of each of several. Raises `InvalidRequestError`."""
    if token_ids is None:
        return parse_prompts(prompts)  # type: ignore[arg-type]  # None is refused there
    ids = parse_prompts(token_ids)  # type: ignore[arg-type]  # texts among them are refused below
    if any(one.token_ids is None for one in ids):
        raise InvalidRequestError("prompt_token_ids must be lists of token ids", "prompt_token_ids")
    if prompts is None:
        return ids
    parsed = parse_prompts(prompts)
    if len(parsed) != len(ids):
        raise InvalidRequestError(f"{len(parsed)} prompts but {len(ids)} lists of token ids", "prompt_token_ids")
    return [msgspec.structs.replace(one, token_ids=mine.token_ids) for one, mine in zip(parsed, ids, strict=True)]


def check_format(form: str) -> None:
    """Raises `InvalidRequestError` for what no template is given here."""
    if form not in ("auto", "string"):
        raise InvalidRequestError(
            f"chat_template_content_format must be auto or string, got {str(form)[:20]!r}: templates are given content "
            "as one text",
            "chat_template_content_format",
        )


class NotHere:
    """Methods of vLLM's `LLM` that have no meaning here. Each raises `InvalidRequestError` with what to use instead."""

    def collective_rpc(self, *_: object, **__: object) -> NoReturn:
        _no("collective_rpc", "no function is sent to the core; `stats` and `get_metrics` say what it does")

    def apply_model(self, *_: object, **__: object) -> NoReturn:
        _no("apply_model", "the model is the core's; load it with transformers to look into it")

    def set_tokenizer(self, *_: object, **__: object) -> NoReturn:
        _no("set_tokenizer", "use LLM(tokenizer=...), a directory")


def _no(name: str, instead: str) -> NoReturn:
    raise InvalidRequestError(f"{name} is refused: {instead} (vLLM's method)", name)
