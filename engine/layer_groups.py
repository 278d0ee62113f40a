"""Layer groups: layers that keep keys and values for the same tokens share a block table.

Layers with full attention keep every token, those with a sliding window of w tokens only the last w. The layers of a
group keep about as many bytes of a token as those of any other: a block of any group is a *page* of one size, and all
draw pages from one pool, so no part of the memory is set aside for a kind of layer (as in Jenga, Zhang et al., SOSP
2025, and vLLM's hybrid KV cache). Layers with fewer or smaller heads than others form groups of more layers: blocks
have as many tokens in each group, so that prefixes, forks and tables are the same everywhere. Where bytes do not add up
part of a page stays empty.

Other things that a layer may keep fit the same table: latent attention keeps one row a token in the place of keys and
values. Recurrent layers keep a state in the place of all tokens: those of a model form one group, whose entry for a
block is the state behind that block's tokens, so many pages at once (a *bundle*), and few blocks have one (`State`).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import accumulate

import msgspec

from engine.errors import ConfigError

_HORIZON = 8192
"""tokens of the sequence for which the size of pages is chosen"""
_GROUP_COST = 0.01
"""what one group more costs in every step (tables, attention metadata), in parts of the KV memory"""


class Chunk(msgspec.Struct, frozen=True, tag=True):
    """A query at position p sees keys in [p // tokens * tokens, p]."""

    tokens: int


class State(msgspec.Struct, frozen=True, tag=True):
    """A query at position p needs what is kept behind position p - 1."""

    pages: int
    """that a state of all layers takes"""
    every: int
    """tokens, of whole blocks: behind so many a state stays where the prefix cache finds it, however long a sequence
    goes on; as many tokens' keys and values take about as much room"""


Window = int | Chunk | State | None
"""what a query sees: so many keys, its own the last; those of its chunk; a state; all before it"""


class Kept(msgspec.Struct, frozen=True):
    """What a layer keeps: of which tokens, and how much of each."""

    window: Window = None
    size: int = 1
    """in a unit that all layers of a model have in common"""


class LayerGroup(msgspec.Struct, frozen=True):
    """`layers` of one group, by their index in the model; its blocks are as large as those of any other."""

    layers: tuple[int, ...]
    window: Window = None
    together: int = 1
    """how many of its layers, one after another, take the place of `together` layers of another group in a page"""


def group_layers(kept: Sequence[Kept | None], max_model_len: int) -> tuple[LayerGroup, ...]:
    """One group for each kind of layer, or several. `kept`: by each layer, in order; None: it is to be in no group."""
    kinds: dict[Window, list[int]] = {}
    for layer, each in enumerate(kept):
        if each is None:
            continue
        kinds.setdefault(each.window if _most_seen(each.window) < max_model_len else None, []).append(layer)
    sizes = [0 if each is None else each.size for each in kept]
    pages = sorted({size for layers in kinds.values() for size in accumulate(sizes[layer] for layer in layers)})
    return _with_places(min((_cut(kinds, sizes, page) for page in pages), key=lambda cut: _cost(cut, sizes)), sizes)


_STATE_ALIGNMENT = 64
"""bytes, at which each layer's begins"""
_FEWEST_BLOCKS, _STATE_SHARE = 32, 4


def state_starts(sizes: Sequence[int]) -> list[int]:
    """At which byte of a state each layer's part begins, of as many bytes; and where the last one ends."""
    return [0, *accumulate(-(-size // _STATE_ALIGNMENT) * _STATE_ALIGNMENT for size in sizes)]


def state_pages(ranks: Sequence[tuple[int, int]]) -> int:
    """That a state takes, as many in each rank. `ranks`: the bytes of a page in each, 0 where none of its layers
    attends, and those of a state, 0 where none keeps one. As many as the rank needs whose states are the largest for
    its pages."""
    of_all = (sum(page for page, _ in ranks), sum(state for _, state in ranks))
    return max(-(-state // page) for page, state in (of_all, *ranks) if page)


def state_page(state_bytes: int, pages: int) -> int:
    """Bytes of a page where nothing but states lies in pages."""
    return -(-state_bytes // (pages * _STATE_ALIGNMENT)) * _STATE_ALIGNMENT


def with_states(groups: Sequence[LayerGroup], pages: int, block_size: int) -> tuple[LayerGroup, ...]:
    """And the group of those layers that keep states, of as many pages, if there are any. What stays of long sequences
    for the prefix cache takes a quarter of their keys and values at most."""
    if not pages:
        return tuple(groups)
    blocks = max(_FEWEST_BLOCKS, -(-_STATE_SHARE * pages // len(groups)))
    return (*groups, LayerGroup((), State(pages, blocks * block_size)))


def full_group(groups: Sequence[LayerGroup]) -> int:
    """The first one that keeps every token. Raises ConfigError where there is none, which a draft's layers need."""
    for index, group in enumerate(groups):
        if group.window is None:
            return index
    raise ConfigError(
        "speculative_config: a draft model or head keeps all tokens of a sequence, and every layer of the target "
        "has a window: no block table would do for both; use method 'ngram' or 'suffix'"
    )


def with_layers_behind(groups: Sequence[LayerGroup], first: int, count: int) -> tuple[LayerGroup, ...]:
    """`count` layers more, from index `first` on, in `full_group`."""
    place = full_group(groups)
    group = groups[place]
    larger = msgspec.structs.replace(group, layers=(*group.layers, *range(first, first + count)))
    return (*groups[:place], larger, *groups[place + 1 :])


def _cut(kinds: dict[Window, list[int]], sizes: list[int], page: int) -> list[LayerGroup]:
    """Layers of a kind into groups of as many as a page holds, at least one."""
    groups = []
    for window, layers in sorted(kinds.items(), key=lambda kind: kind[1]):
        start, filled = 0, 0
        for end, layer in enumerate(layers):
            if end > start and filled + sizes[layer] > page:
                groups.append(LayerGroup(tuple(layers[start:end]), window))
                start, filled = end, 0
            filled += sizes[layer]
        groups.append(LayerGroup(tuple(layers[start:]), window))
    return groups


def _cost(groups: list[LayerGroup], sizes: list[int]) -> float:
    kept = taken = 0
    page = _page(groups, sizes)
    for group in groups:
        tokens = int(min(_most_seen(group.window), _HORIZON))
        kept += tokens * sum(sizes[layer] for layer in group.layers)
        taken += tokens * page
    return taken / kept - 1 + _GROUP_COST * len(groups)


def _page(groups: list[LayerGroup], sizes: list[int]) -> int:
    return max(sum(sizes[layer] for layer in group.layers) for group in groups)


def _with_places(groups: list[LayerGroup], sizes: list[int]) -> tuple[LayerGroup, ...]:
    """A page is cut at the same places for all groups: into as many parts as leave no layer in two."""
    if len(groups) == 1:
        return tuple(groups)
    page, of_kind = _page(groups, sizes), [{sizes[layer] for layer in group.layers} for group in groups]
    if any(len(each) > 1 for each in of_kind):
        return tuple(msgspec.structs.replace(group, together=len(group.layers)) for group in groups)
    fits = [page // each.pop() for each in of_kind]
    parts = math.gcd(*fits)
    return tuple(
        msgspec.structs.replace(group, together=count // parts) for group, count in zip(groups, fits, strict=True)
    )


def first_kept(num_tokens: int, window: Window) -> int:
    """The first position that a query at position `num_tokens`, or any later one, sees."""
    if isinstance(window, Chunk):
        return num_tokens // window.tokens * window.tokens
    if isinstance(window, State):
        return max(0, num_tokens - 1)
    return 0 if window is None else max(0, num_tokens - window + 1)


def kept_until(position: int, window: int | Chunk | State) -> int:
    """The least number of tokens after which no query sees what lies before `position`."""
    if isinstance(window, Chunk):
        return -(-position // window.tokens) * window.tokens
    return position + (1 if isinstance(window, State) else window - 1)


def _most_seen(window: Window) -> float:
    """Keys that a query sees at most."""
    if window is None or isinstance(window, State):
        return math.inf
    return window.tokens if isinstance(window, Chunk) else window


def pages_of(window: Window) -> int:
    """That an entry of a group's table takes."""
    return window.pages if isinstance(window, State) else 1


def most_blocks(num_tokens: int, window: Window, block_size: int, max_query_len: int | None, forks: int = 0) -> int:
    """Pages of one group that a sequence holds at most, at any time until `num_tokens` tokens are computed.

    `max_query_len`: tokens that a step computes of a sequence at most; they need blocks together with what the first of
    them sees. `forks`: places at which others are forked from it, behind each of which a state is kept.
    """
    blocks = -(-num_tokens // block_size)
    if isinstance(window, State):
        # Before the last step, behind it and the next one, behind the prompt's last block, and on the way in two steps.
        on_the_way = 2 * min(-(-(max_query_len or num_tokens) // window.every), num_tokens // window.every)
        return min(blocks, 4 + forks + on_the_way) * window.pages
    if window is None or max_query_len is None:
        return blocks
    return min(blocks, -(-(int(_most_seen(window)) - 1 + max_query_len) // block_size) + 1)
