"""Layer groups: every layer in one, of equal size as far as that costs little, and what a sequence holds in each."""

from __future__ import annotations

import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from engine.kv_cache.kv_cache import KVCache, SequenceBlocks
from engine.layer_groups import LayerGroup, group_layers, most_blocks

LENGTH = 32768


def pattern(num_layers: int, every: int, window: int) -> list[int | None]:
    """Gemma 3: each layer number `every` sees everything."""
    return [None if (layer + 1) % every == 0 else window for layer in range(num_layers)]


@pytest.mark.parametrize(
    ("windows", "sizes"),
    [
        ([None] * 30, {(30, None): 1}),
        ([4096] * 32, {(32, 4096): 1}),
        ([4096, None] * 13, {(13, 4096): 1, (13, None): 1}),
        (pattern(18, 6, 512), {(3, 512): 5, (3, None): 1}),
        (pattern(48, 6, 1024), {(8, 1024): 5, (8, None): 1}),
        (pattern(26, 6, 512), {(4, 512): 5, (2, 512): 1, (4, None): 1}),
        (pattern(62, 6, 1024), {(10, 1024): 5, (2, 1024): 1, (10, None): 1}),
    ],
    ids=["llama", "mistral", "gemma 2 2b", "gemma 3 270m", "gemma 3 12b", "gemma 3 1b", "gemma 3 27b"],
)
def test_known_models(windows: list[int | None], sizes: dict[tuple[int, int | None], int]) -> None:
    found: dict[tuple[int, int | None], int] = {}
    for group in group_layers(windows, LENGTH):
        found[len(group.layers), group.window] = found.get((len(group.layers), group.window), 0) + 1
    assert found == sizes


@given(st.lists(st.none() | st.sampled_from([1, 16, 512]), min_size=1, max_size=40))
def test_every_layer_is_in_one_group_of_its_kind(windows: list[int | None]) -> None:
    groups = group_layers(windows, LENGTH)
    assert sorted(layer for group in groups for layer in group.layers) == list(range(len(windows)))
    assert all(windows[layer] == group.window for group in groups for layer in group.layers)
    largest = max(len(group.layers) for group in groups)
    for window in {group.window for group in groups}:
        smaller = [group for group in groups if group.window == window and len(group.layers) < largest]
        assert len(smaller) <= 1, "blocks are half empty that need not be"


def test_a_window_that_no_sequence_exceeds_is_none() -> None:
    assert group_layers([512, None], 512) == (LayerGroup((0, 1)),)
    assert len(group_layers([512, None], 513)) == 2


@given(st.integers(1, 60), st.none() | st.integers(1, 20), st.integers(1, 5), st.lists(st.integers(1, 7), min_size=60))
def test_no_sequence_holds_more_than_the_bound(
    num_tokens: int, window: int | None, block_size: int, chunks: list[int]
) -> None:
    kv = KVCache(200, block_size, False, [window], 7)
    blocks = kv.open()
    while blocks.num_tokens < num_tokens:
        assert kv.append(blocks, min(blocks.num_tokens + chunks.pop(), num_tokens)) is not None
        assert kv.pool.num_used <= most_blocks(blocks.num_tokens, window, block_size, 7)


def test_gemma_3_270m_keeps_what_its_layers_see_and_hardly_more() -> None:
    """A sequence of 4,096 tokens: 3 layers keep all of them, 15 the last 512."""
    groups = group_layers(pattern(18, 6, 512), LENGTH)
    kv = KVCache(1000, 16, True, [group.window for group in groups], 512)
    blocks = kv.open()
    for upto in (*range(512, 4097, 512), *range(4097, 4097 + 64)):
        assert kv.append(blocks, upto) is not None
        kept = kv.pool.num_used * 16 * 3
        if upto > 4096:
            exact = upto * 3 + 512 * 15
            assert kept <= 1.02 * exact


def test_a_pool_under_mixed_sequences_wastes_less_than_two_percent() -> None:
    """Gemma 3 270M, prompts of 200 to 4,000 tokens and answers of 50 to 400: blocks held against tokens seen."""
    rng = random.Random(0)
    groups = group_layers(pattern(18, 6, 512), LENGTH)
    kv = KVCache(40_000, 16, False, [group.window for group in groups], 512)

    def start() -> tuple[SequenceBlocks, int]:
        blocks, length = kv.open(), rng.randrange(200, 4000)
        for upto in (*range(512, length, 512), length):
            assert kv.append(blocks, upto) is not None
        return blocks, length + rng.randrange(50, 400)

    live = [start() for _ in range(32)]
    held = seen = 0
    for _ in range(300):
        for i, (blocks, end) in enumerate(live):
            if blocks.num_tokens == end:
                kv.free(blocks)
                live[i] = start()
            else:
                assert kv.append(blocks, blocks.num_tokens + 1) is not None
        held += kv.pool.num_used * 16 * 3
        seen += sum(3 * blocks.num_tokens + 15 * min(blocks.num_tokens, 512) for blocks, _ in live)
    assert 0.98 <= seen / held <= 1
