"""What Dynamo's frontend asks of an engine, in our words, and what we answer, in its own. Without Dynamo, torch-free.

Contract: `GenerateRequest` and `GenerateChunk` of `dynamo.common.backend.engine` (ai-dynamo 1.6). Dynamo's frontend
renders templates, tokenizes, detokenizes and looks for stop strings; here there are tokens alone.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import msgspec

from engine.errors import InvalidRequestError
from engine.request import CompletionOutput, LogprobsAt, RequestOutput, SamplingParams, StructuredOutputsParams

_SAMPLING = (
    "n",
    "best_of",
    "temperature",
    "top_p",
    "top_k",
    "min_p",
    "presence_penalty",
    "frequency_penalty",
    "repetition_penalty",
    "seed",
    "use_beam_search",
    "length_penalty",
    "logit_bias",
    "bad_words",
    "allowed_token_ids",
)
_STOPPING = ("max_tokens", "min_tokens", "ignore_eos")
_DYNAMOS = frozenset({"stop", "include_stop_str_in_output", "skip_special_tokens"})
"""text is Dynamo's"""
_GUIDED = ("json", "regex", "choice", "grammar", "structural_tag", "whitespace_pattern")
_FINISH = {"abort": "cancelled"}


def sampling_params(request: Mapping[str, Any], defaults: SamplingParams) -> SamplingParams:
    """`defaults`: where the request says nothing. Raises `InvalidRequestError`, also for what has no effect here."""
    options, stops = _section(request, "sampling_options"), _section(request, "stop_conditions")
    told = _section(request, "output_options")
    given: dict[str, Any] = {name: options.pop(name, None) for name in _SAMPLING}
    given |= {name: stops.pop(name, None) for name in _STOPPING}
    given |= {name: _count(told.pop(name, None), name) for name in ("logprobs", "prompt_logprobs")}
    hidden, seen = (stops.pop(name, None) or [] for name in ("stop_token_ids_hidden", "stop_token_ids"))
    given["stop_token_ids"] = [*dict.fromkeys([*hidden, *seen])] or None
    given["structured_outputs"] = _structured(options.pop("guided_decoding", None))
    for section in (options, stops):
        for name, value in section.items():
            if value not in (None, False) and name not in _DYNAMOS:
                raise InvalidRequestError(f"{name} has no effect in this engine: leave it out", name)
    kept = {name: value for name, value in msgspec.structs.asdict(defaults).items() if given.get(name) is None}
    asked = {name: value for name, value in given.items() if value is not None}
    texts = given["logprobs"] is not None or given["prompt_logprobs"] is not None
    fixed = {"stop": None, "max_tokens": given["max_tokens"], "detokenize": texts}
    return SamplingParams.from_optional(**{**kept, **asked, **fixed})


def chunks(output: RequestOutput, generated: dict[int, int]) -> Iterator[dict[str, Any]]:
    """Of what is new of each sample. `generated`: tokens of each so far, kept by the caller between outputs."""
    for sample in output.outputs:
        generated[sample.index] = generated.get(sample.index, 0) + len(sample.token_ids)
        if not sample.token_ids and sample.finish_reason is None:
            continue
        chunk: dict[str, Any] = {"token_ids": sample.token_ids, "index": sample.index, **_logprobs(sample)}
        if sample.finish_reason is not None:
            chunk["finish_reason"] = _FINISH.get(sample.finish_reason, sample.finish_reason)
            chunk["completion_usage"] = _usage(output, generated[sample.index])
            if output.prompt_logprobs is not None:
                chunk["engine_data"] = {"prompt_logprobs": _of_prompt(output.prompt_logprobs)}
        yield chunk


def _usage(output: RequestOutput, generated: int) -> dict[str, Any]:
    prompt = len(output.prompt_token_ids)
    return {
        "prompt_tokens": prompt,
        "completion_tokens": generated,
        "total_tokens": prompt + generated,
        "prompt_tokens_details": {"cached_tokens": output.num_cached_tokens},
    }


def _logprobs(sample: CompletionOutput) -> dict[str, Any]:
    if not sample.logprobs:
        return {}
    chosen = [at[token].logprob for at, token in zip(sample.logprobs, sample.token_ids, strict=True)]
    tops = [[_top(token, at) for token in at] for at in sample.logprobs]
    return {"log_probs": chosen, "top_logprobs": tops}


def _top(token: int, at: LogprobsAt) -> dict[str, Any]:
    found = at[token]
    text = found.decoded_token or ""
    return {"rank": found.rank, "token_id": token, "token": text, "logprob": found.logprob, "bytes": [*text.encode()]}


def _of_prompt(positions: Sequence[LogprobsAt | None]) -> list[dict[str, Any] | None]:
    return [
        None if at is None else {str(token): msgspec.to_builtins(found) for token, found in at.items()}
        for at in positions
    ]


def _structured(guided: Any) -> StructuredOutputsParams | None:
    if not guided:
        return None
    if not isinstance(guided, Mapping):
        raise InvalidRequestError(f"guided_decoding must be an object, got {type(guided).__name__}", "guided_decoding")
    return StructuredOutputsParams(
        **{name: guided[name] for name in _GUIDED if guided.get(name) is not None}, strict=False
    )


def _section(request: Mapping[str, Any], name: str) -> dict[str, Any]:
    found = request.get(name) or {}
    if not isinstance(found, Mapping):
        raise InvalidRequestError(f"{name} must be an object, got {type(found).__name__}", name)
    return dict(found)


def _count(value: Any, name: str) -> int | None:
    if value is None or value == "":
        return None
    try:
        return int(value)
    except (TypeError, ValueError, OverflowError):
        raise InvalidRequestError(f"{name} must be a number, got {value!r:.100}", name) from None
