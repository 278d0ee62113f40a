"""Sampling parameters under vLLM's names: what has a name of ours, what has no effect, and what to use instead."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any

from engine.errors import InvalidRequestError

RENAMED = {"guided_decoding": "structured_outputs"}
WITHOUT_EFFECT: dict[str, tuple[object, ...]] = {
    "flat_logprobs": (False,),
    "logits_processors": (None, []),
    "logprob_token_ids": (None, []),
    "output_text_buffer_length": (),
    "prompt_logprob_start": (None, 0),
    "prompt_logprob_token_ids": (None, []),
    "repetition_detection": (None,),
    "routed_experts_prompt_start": (0,),
    "skip_clone": (),
    "skip_reading_prefix_cache": (None, False),
    "spaces_between_special_tokens": (),
    "stream_interval": (None, 1),
    "thinking_token_budget": (None, -1),
    "trace_decode_token_ids": (None,),
}
"""with the values that ask for nothing; (): all do"""
INSTEAD = {
    "flat_logprobs": "logprobs are lists of dictionaries",
    "logits_processors": "use logit_bias, allowed_token_ids, bad_words or structured_outputs",
    "logprob_token_ids": "use logprobs, and look for them among the alternatives",
    "prompt_logprob_start": "use prompt_logprobs, of which every position is given",
    "prompt_logprob_token_ids": "use prompt_logprobs",
    "repetition_detection": "use repetition_penalty, frequency_penalty or max_tokens",
    "routed_experts_prompt_start": "experts are not returned",
    "skip_reading_prefix_cache": "give the prompt a cache_salt that no other has",
    "stream_interval": "an output holds all that is new when it is taken",
    "thinking_token_budget": "use StructuredOutputsParams(thinking=Thinking(budget=...)), or the field of "
    "engine-serve's chat completions",
    "trace_decode_token_ids": "tokens are always sampled; prompt_logprobs score given ones",
}


def translated(given: Mapping[str, Any], fields: Collection[str]) -> dict[str, Any]:
    """In our names, `fields`. Raises `InvalidRequestError` naming the field for what means something in vLLM and
    nothing here, and for a name that is none."""
    ours: dict[str, Any] = {}
    for name, value in given.items():
        own = RENAMED.get(name, name)
        if own not in fields:
            if name not in WITHOUT_EFFECT:
                raise InvalidRequestError(f"there is no sampling parameter {name!r}", name)
            if WITHOUT_EFFECT[name] and value not in WITHOUT_EFFECT[name]:
                raise InvalidRequestError(f"{name} is refused: {INSTEAD[name]} (vLLM's parameter)", name)
            continue
        if own in ours or (own != name and own in given):
            raise InvalidRequestError(f"{name} and {own} are one parameter: give one", name)
        ours[own] = value
    return ours
