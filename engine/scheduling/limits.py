"""What can never be served, whatever else there is: refused before it is queued, with the field and the setting.

The front end's admission has looked at all of it with better words. This is for what reaches the core without it: a
frame that was damaged or forged must not reach the device.
"""

from __future__ import annotations

from engine.config import SchedulerConfig
from engine.core.wire import AddRequest
from engine.errors import InvalidRequestError
from engine.kv_cache.kv_cache import KVCache
from engine.limits import RANGES, check_token_ids
from engine.step import RowParams


def check_servable(request: AddRequest, max_total: int, config: SchedulerConfig, kv: KVCache, pinned: int) -> int:
    """Returns the blocks that the request may hold at once. `max_total`: tokens at which each of its samples ends;
    `pinned`: blocks that it can not have. Raises `InvalidRequestError`."""
    prompt_len = len(request.prompt_token_ids)
    if prompt_len == 0:
        raise InvalidRequestError("the prompt must hold at least one token", "prompt")
    if request.max_tokens < 1:
        raise InvalidRequestError(f"max_tokens must be at least 1, got {request.max_tokens}", "max_tokens")
    if prompt_len + 1 > config.max_model_len:
        raise InvalidRequestError(
            f"a prompt of {prompt_len} tokens leaves no room to generate one: the context length is "
            f"{config.max_model_len} tokens (--max-model-len)",
            "prompt",
        )
    RANGES["n"].check("n", 1 + len(request.followers))
    if len(set(request.request_ids)) < len(request.request_ids):
        raise InvalidRequestError("the samples of a request need ids of their own", "request_id")
    if request.pin is not None and (request.beams is not None or request.followers):
        raise InvalidRequestError("a prefix is pinned by a request with one sequence", "pin")
    RANGES["priority"].check("priority", request.priority)
    check_token_ids("prompt", request.prompt_token_ids, config.vocab_size)
    _check_params(request.params, config.vocab_size)
    for follower in request.followers:
        RANGES["seed"].check("seed", follower.seed)
    width = _width(request, config)
    # The last token is sampled and never computed, so it needs no KV. Beams may have nothing in common but the prompt.
    own = kv.blocks_beyond(prompt_len, max_total - 1)
    need, total = kv.blocks_for(max_total - 1) + (width - 1) * own, kv.pool.num_blocks - pinned
    if need > total:
        raise InvalidRequestError(
            f"a prompt of {prompt_len} tokens with {max_total - prompt_len} to generate needs {need} KV blocks, "
            f"but there are {total} (raise --kv-cache-memory, or lower max_tokens)",
            "max_tokens" if kv.blocks_for(prompt_len) <= total else "prompt",
        )
    return need


def _width(request: AddRequest, config: SchedulerConfig) -> int:
    if request.beams is None:
        return 1
    width = request.beams.width
    if not 1 <= width <= config.max_num_seqs:
        raise InvalidRequestError(
            f"a search with {width} beams needs as many rows, but there are {config.max_num_seqs} (--max-num-seqs)",
            "best_of",
        )
    if len(request.followers) >= width:
        raise InvalidRequestError(f"a search with {width} beams cannot return {1 + len(request.followers)}", "n")
    RANGES["length_penalty"].check("length_penalty", request.beams.length_penalty)
    return width


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
