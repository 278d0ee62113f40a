"""Layer groups: layers that keep keys and values for the same tokens share a block table.

Layers with full attention keep every token, those with a sliding window of w tokens only the last w. All groups have
the same number of layers, so a block has the same size in bytes for each of them and they draw from one pool: no part
of the memory is set aside for a kind of layer (as in Jenga, Zhang et al., SOSP 2025, and vLLM's hybrid KV cache). Where
the numbers of layers have no common divisor some groups lack layers, and part of their blocks stays empty.

Other things that a layer may keep fit the same table: latent attention keeps one row a token in the place of keys and
values, a recurrent layer keeps a state, which is a window of one token.
"""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from engine.errors import ConfigError

_HORIZON = 8192
"""tokens of the sequence for which the size of groups is chosen"""
_GROUP_COST = 0.01
"""what one group more costs in every step (tables, attention metadata), in parts of the KV memory"""


class LayerGroup(msgspec.Struct, frozen=True):
    """`layers` of one group, by their index in the model; its blocks are as large as those of the largest group."""

    layers: tuple[int, ...]
    window: int | None = None


def group_layers(windows: Sequence[int | None], max_model_len: int) -> tuple[LayerGroup, ...]:
    """One group for each kind of layer, or several of equal size; `windows`: of each layer, in order."""
    kinds: dict[int | None, list[int]] = {}
    for layer, window in enumerate(windows):
        kinds.setdefault(window if window is not None and window < max_model_len else None, []).append(layer)
    size = min(range(1, len(windows) + 1), key=lambda size: _cost(kinds, size))
    return tuple(
        LayerGroup(tuple(layers[start : start + size]), window)
        for window, layers in sorted(kinds.items(), key=lambda kind: kind[1])
        for start in range(0, len(layers), size)
    )


def full_group(groups: Sequence[LayerGroup]) -> int:
    """The first one that keeps every token. Raises ConfigError where there is none, which a draft's layers need."""
    for index, group in enumerate(groups):
        if group.window is None:
            return index
    raise ConfigError(
        "speculative_config: a draft model or head keeps all tokens of a sequence, and every layer of the target "
        "has a window: no block table would do for both; use method 'ngram' or 'suffix'"
    )


def with_layers_behind(groups: Sequence[LayerGroup], count: int) -> tuple[LayerGroup, ...]:
    """`count` layers more, whose indices follow those of the others, in `full_group`."""
    first, place = sum(len(group.layers) for group in groups), full_group(groups)
    group = groups[place]
    larger = LayerGroup((*group.layers, *range(first, first + count)), group.window)
    return (*groups[:place], larger, *groups[place + 1 :])


def _cost(kinds: dict[int | None, list[int]], size: int) -> float:
    kept = empty = groups = 0
    for window, layers in kinds.items():
        tokens = _HORIZON if window is None else min(window, _HORIZON)
        groups_of_kind = -(-len(layers) // size)
        kept += tokens * len(layers)
        empty += tokens * (groups_of_kind * size - len(layers))
        groups += groups_of_kind
    return empty / kept + _GROUP_COST * groups


def first_kept(num_tokens: int, window: int | None) -> int:
    """The first position that a query at position `num_tokens`, or any later one, sees."""
    return 0 if window is None else max(0, num_tokens - window + 1)


def most_blocks(num_tokens: int, window: int | None, block_size: int, max_query_len: int | None) -> int:
    """Blocks of one group that a sequence holds at most, at any time until `num_tokens` tokens are computed.

    `max_query_len`: tokens that a step computes of a sequence at most; they need blocks together with what the first of
    them sees.
    """
    blocks = -(-num_tokens // block_size)
    if window is None or max_query_len is None:
        return blocks
    return min(blocks, -(-(window - 1 + max_query_len) // block_size) + 1)
