"""The order of a row's tokens, and prefixes of it, without sorting the vocabulary.

One total order serves greedy, top-k, top-p and log-probabilities: larger logit first, lower id first among equals. So
ties, which bf16 logits produce all the time, are cut the same way on every device.

- `top_ids`: the first k. Tokens are grouped in blocks of neighbours; only the k blocks with the largest maxima
  (again: lower block first among equals) can hold one of the first k, so a pass of maxima and two small `topk` over
  distinct integer keys are exact.
- `prefix_mask`: the shortest prefix whose mass reaches a target, for prefixes of any length: radix selection over the
  bits of the order key, with integer masses, so that no order of summation can change the result.
"""

from __future__ import annotations

import torch

_ID_MASK = 0x7FFFFFFF
_BLOCKS = (64, 32, 16)
_RADIX_LEVELS = ((21, 11), (10, 11), (0, 10))
"""(shift, bits) of the three digits of a 32-bit key, most significant first"""


def order_keys(logits: torch.Tensor) -> torch.Tensor:
    """int32 keys that order as the float32 logits do; +0 and -0 are equal."""
    bits = (logits + 0.0).view(torch.int32)
    return bits ^ ((bits >> 31) & 0x7FFFFFFF)


def _ranked_keys(values: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
    """Distinct int64 keys: the value decides, then the lower id."""
    return (order_keys(values).to(torch.int64) << 32) | (_ID_MASK - ids)


def _leading_ids(values: torch.Tensor, ids: torch.Tensor, k: int) -> torch.Tensor:
    keys = torch.topk(_ranked_keys(values, ids), k, dim=-1, sorted=True).values
    return _ID_MASK - (keys & 0xFFFFFFFF)


def top_ids(logits: torch.Tensor, k: int) -> torch.Tensor:
    """The first `k` (<= vocabulary) token ids of each row in order: `[m, V]` float32 -> `[m, k]` int64."""
    vocab = logits.shape[1]
    block = min(_BLOCKS, key=lambda size: vocab // size + k * size)
    if k * block * 2 > vocab:
        return _leading_ids(logits, torch.arange(vocab, device=logits.device), k)
    maxima = _block_maxima(logits, block)
    offsets = torch.arange(block, device=logits.device)
    blocks = _leading_ids(maxima, torch.arange(maxima.shape[1], device=logits.device), k)
    ids = (blocks.unsqueeze(2) * block + offsets).flatten(1)
    values = logits.gather(1, ids.clamp(max=vocab - 1))
    if vocab % block:  # ids past the end rank after every real token: smallest value, then the higher id
        values = values.masked_fill_(ids >= vocab, float("-inf"))
    return _leading_ids(values, ids, k).clamp_(max=vocab - 1)  # a negative NaN ranks even lower


def _block_maxima(logits: torch.Tensor, block: int) -> torch.Tensor:
    whole = logits.shape[1] // block * block
    maxima = logits[:, :whole].view(logits.shape[0], -1, block).amax(-1)
    if whole == logits.shape[1]:
        return maxima
    return torch.cat((maxima, logits[:, whole:].amax(-1, keepdim=True)), dim=1)


def row_argmax(logits: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """(maxima `[m]`, ids int64 `[m]`), lowest id among equals; a NaN anywhere makes the maximum NaN."""
    vocab = logits.shape[1]
    if logits.device.type != "cpu" or logits.numel() < 1 << 20 or vocab % 64:
        maxima, ids = logits.max(dim=-1)
        return maxima, ids
    # CPU: `amax` is vectorised and `max` with indices is not
    maxima, blocks = logits.view(logits.shape[0], -1, 64).amax(-1).max(dim=-1)
    ids = blocks.unsqueeze(1) * 64 + torch.arange(64)
    return maxima, blocks * 64 + logits.gather(1, ids).argmax(-1)


def prefix_mask(keys: torch.Tensor, mass: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    """Which tokens belong to the shortest prefix with mass >= target.

    `keys` int32 `[m, V]` (`order_keys`), `mass` int64 `[m, V]` >= 0 with a total below 2^63, `target` int64 `[m]` >=
    1. A target above the total means the total. Returns bool `[m, V]`.
    """
    unsigned = keys.to(torch.int64) + (1 << 31)
    remaining = torch.minimum(target, mass.sum(-1)).unsqueeze(1)
    prefix = torch.zeros_like(remaining)
    for shift, bits in _RADIX_LEVELS:
        bins = 1 << bits
        digits = (unsigned >> shift) & (bins - 1)
        active = mass.masked_fill((unsigned >> (shift + bits)) != prefix, 0)
        histogram = torch.zeros((keys.shape[0], bins), dtype=torch.int64, device=keys.device)
        cumulative = histogram.scatter_add_(1, digits, active).flip(1).cumsum(1)
        taken = (cumulative < remaining).sum(1, keepdim=True).clamp_(max=bins - 1)
        before = cumulative.gather(1, (taken - 1).clamp_(min=0)).masked_fill_(taken == 0, 0)
        remaining = remaining - before
        prefix = (prefix << bits) | (bins - 1 - taken)
    # `remaining` is what the tokens that equal the boundary key must still give, lowest ids first
    ties = mass.masked_fill(unsigned != prefix, 0)
    tie_kept = (ties > 0) & (ties.cumsum(1) - ties < remaining)
    return (unsigned > prefix) | tie_kept
