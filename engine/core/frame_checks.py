"""What a request says of itself, whatever there is to serve it with. The front end's admission has looked at all of it
with better words. This is for what reaches the core without it: a frame that was damaged or forged must not reach the
device."""

from __future__ import annotations

from engine.core.wire import AddRequest
from engine.errors import InvalidRequestError
from engine.limits import RANGES, check_token_ids
from engine.step import RowParams

_MOST_TOKENS = 2**31
_ROW_RANGES = (
    "temperature",
    "top_p",
    "min_p",
    "repetition_penalty",
    "presence_penalty",
    "frequency_penalty",
    "seed",
    "min_tokens",
    "top_k",
)


def check_frame(request: AddRequest, vocab_size: int) -> None:
    """Raises `InvalidRequestError` naming the field."""
    if not request.prompt_token_ids:
        raise InvalidRequestError("the prompt must hold at least one token", "prompt")
    if request.max_tokens < 1:
        raise InvalidRequestError(f"max_tokens must be at least 1, got {request.max_tokens}", "max_tokens")
    RANGES["n"].check("n", 1 + len(request.followers))
    if len(set(request.request_ids)) < len(request.request_ids):
        raise InvalidRequestError("the samples of a request need ids of their own", "request_id")
    if request.pin is not None and (request.beams is not None or request.followers):
        raise InvalidRequestError("a prefix is pinned by a request with one sequence", "pin")
    RANGES["priority"].check("priority", request.priority)
    RANGES["weight"].check("weight", request.tenant.weight)
    check_token_ids("prompt", request.prompt_token_ids, vocab_size)
    _check_params(request.params, vocab_size)
    for follower in request.followers:
        RANGES["seed"].check("seed", follower.seed)
    _check_resumed(request, vocab_size)
    if request.beams is not None:
        RANGES["length_penalty"].check("length_penalty", request.beams.length_penalty)


def _check_resumed(request: AddRequest, vocab_size: int) -> None:
    if request.resumed and (request.beams is not None or len(request.resumed) != len(request.request_ids)):
        raise InvalidRequestError("what is resumed are the samples of a request, each of them", "resumed")
    for had in request.resumed:
        check_token_ids("resumed", had.token_ids, vocab_size)
        if len(had.token_ids) >= request.max_tokens:
            raise InvalidRequestError(
                f"resumed: {len(had.token_ids)} tokens are there, and at most {request.max_tokens} are wanted",
                "resumed",
            )
        if not 0 <= had.prompt_logprobs < len(request.prompt_token_ids):
            raise InvalidRequestError(f"resumed: {had.prompt_logprobs} positions of the prompt", "resumed")


def _check_params(params: RowParams, vocab_size: int) -> None:
    for name in _ROW_RANGES:
        RANGES[name].check(name, getattr(params, name))
    for name in ("logprobs", "prompt_logprobs"):
        value = getattr(params, name)
        if value is not None and not 0 <= value <= vocab_size:
            raise InvalidRequestError(f"{name} must be in [0, {vocab_size}], got {value}", name)
    for bias in params.logit_bias.values():
        RANGES["logit_bias"].check("logit_bias", bias)
    check_token_ids("logit_bias", params.logit_bias, vocab_size)
    check_token_ids("allowed_token_ids", params.allowed_token_ids or (), vocab_size)
    # What only forbids and compares may name tokens that a tokenizer knows and the model does not.
    check_token_ids("stop_token_ids", params.stop_token_ids, _MOST_TOKENS)
    for word in params.bad_words:
        check_token_ids("bad_words", word, _MOST_TOKENS)
