"""What can never be served, whatever else there is: refused before it is queued, with the field and the setting."""

from __future__ import annotations

from engine.config import SchedulerConfig
from engine.core.frame_checks import check_frame
from engine.core.wire import AddRequest
from engine.errors import InvalidRequestError
from engine.kv_cache.kv_cache import KVCache


def check_servable(request: AddRequest, max_total: int, config: SchedulerConfig, kv: KVCache, pinned: int) -> int:
    """Returns the blocks that the request may hold at once. `max_total`: tokens at which each of its samples ends;
    `pinned`: blocks that it can not have. Raises `InvalidRequestError`."""
    check_frame(request, config.vocab_size)
    prompt_len = len(request.prompt_token_ids)
    if prompt_len + (request.params.pooling is None) > config.max_model_len:
        raise InvalidRequestError(
            f"a prompt of {prompt_len} tokens is too long, or leaves no room to generate one: the context length is "
            f"{config.max_model_len} tokens (--max-model-len)",
            "prompt",
        )
    width = _width(request, config)
    # The last token is sampled and never computed, so it needs no KV. Beams may have nothing in common but the prompt;
    # behind a preemption one is computed again, and keeps a state where each of the others leaves it.
    own = kv.blocks_beyond(prompt_len, max_total - 1)
    need, total = kv.blocks_for(max_total - 1, width - 1) + (width - 1) * own, kv.pool.num_blocks - pinned
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
    return width
