"""Layer groups: every layer in one, of equal size as far as that costs little, and what a sequence holds in each."""

from __future__ import annotations

import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from engine.kv_cache.kv_cache import KVCache
from engine.kv_cache.sequence_blocks import SequenceBlocks
from engine.layer_groups import (
    Chunk,
    Kept,
    LayerGroup,
    State,
    Window,
    group_layers,
    most_blocks,
    with_layers_behind,
)

LENGTH = 32768
WINDOWS = st.none() | st.integers(1, 20) | st.builds(Chunk, st.integers(1, 20))


def pattern(num_layers: int, every: int, window: int, sizes: tuple[int, int] = (1, 1)) -> list[Kept]:
    """Gemma 3: each layer number `every` sees everything. `sizes`: of layers with a window, and of the others."""
    sliding, full = Kept(window, sizes[0]), Kept(None, sizes[1])
    return [full if (layer + 1) % every == 0 else sliding for layer in range(num_layers)]


@pytest.mark.parametrize(
    ("kept", "sizes"),
    [
        ([Kept()] * 30, {(30, None): 1}),
        ([Kept(4096)] * 32, {(32, 4096): 1}),
        (pattern(26, 2, 4096), {(13, 4096): 1, (13, None): 1}),
        (pattern(18, 6, 512), {(3, 512): 5, (3, None): 1}),
        (pattern(48, 6, 1024), {(8, 1024): 5, (8, None): 1}),
        (pattern(26, 6, 512), {(4, 512): 5, (2, 512): 1, (4, None): 1}),
        (pattern(62, 6, 1024), {(10, 1024): 5, (2, 1024): 1, (10, None): 1}),
    ],
    ids=["llama", "mistral", "gemma 2 2b", "gemma 3 270m", "gemma 3 12b", "gemma 3 1b", "gemma 3 27b"],
)
def test_known_models(kept: list[Kept], sizes: dict[tuple[int, int | None], int]) -> None:
    found: dict[tuple[int, int | None], int] = {}
    for group in group_layers(kept, LENGTH):
        assert group.together == 1
        found[len(group.layers), group.window] = found.get((len(group.layers), group.window), 0) + 1
    assert found == sizes


@given(st.lists(st.none() | st.sampled_from([1, 16, 512]), min_size=1, max_size=40))
def test_every_layer_is_in_one_group_of_its_kind(windows: list[int | None]) -> None:
    groups = group_layers([Kept(window) for window in windows], LENGTH)
    assert sorted(layer for group in groups for layer in group.layers) == list(range(len(windows)))
    assert all(windows[layer] == group.window for group in groups for layer in group.layers)
    largest = max(len(group.layers) for group in groups)
    for window in {group.window for group in groups}:
        smaller = [group for group in groups if group.window == window and len(group.layers) < largest]
        assert len(smaller) <= 1, "blocks are half empty that need not be"


def test_a_window_that_no_sequence_exceeds_is_none() -> None:
    kept = [Kept(512), Kept()]
    assert group_layers(kept, 512) == (LayerGroup((0, 1)),)
    assert len(group_layers(kept, 513)) == 2


def test_a_layer_that_keeps_nothing_is_in_no_group() -> None:
    (group,) = group_layers([Kept(), None, Kept(), None], LENGTH)
    assert group.layers == (0, 2)


@pytest.mark.parametrize(
    ("kept", "shapes"),
    [
        (pattern(60, 6, 1024, (4096, 2048)), {(5, 1): 10, (10, 2): 1}),
        (pattern(15, 5, 512, (256, 512)), {(6, 2): 2, (3, 1): 1}),
        (pattern(30, 6, 1024, (2048, 1024)), {(3, 1): 8, (1, 1): 1, (5, 2): 1}),
        ([Kept(None, 8), Kept(None, 2), Kept(None, 4)], {(3, 1): 1}),
    ],
    ids=["gemma 4 31b", "gemma 4 e2b", "gemma 4 26b", "sizes alone make no group"],
)
def test_layers_of_several_sizes_fill_pages_of_one(kept: list[Kept], shapes: dict[tuple[int, int], int]) -> None:
    """Shapes: layers of a group, and how many of them lie together; and how many such groups there are."""
    found: dict[tuple[int, int], int] = {}
    for group in group_layers(kept, LENGTH):
        found[len(group.layers), group.together] = found.get((len(group.layers), group.together), 0) + 1
    assert found == shapes


@given(
    st.lists(
        st.builds(Kept, st.none() | st.sampled_from([16, 512]), st.sampled_from([1, 2, 3, 8])), min_size=1, max_size=30
    )
)
def test_no_layer_lies_in_two_parts_of_a_page(kept: list[Kept]) -> None:
    groups = group_layers(kept, LENGTH)
    assert sorted(layer for group in groups for layer in group.layers) == list(range(len(kept)))
    assert all(kept[layer].window == group.window for group in groups for layer in group.layers)
    page = max(sum(kept[layer].size for layer in group.layers) for group in groups)
    parts: dict[int, int] = {}
    for group in groups:
        for start in range(0, len(group.layers), group.together):
            part = sum(kept[layer].size for layer in group.layers[start : start + group.together])
            parts[start // group.together] = max(parts.get(start // group.together, 0), part)
    assert sum(parts.values()) == page, "cutting a page into parts makes it no larger"


def test_a_drafts_layers_come_behind_those_that_keep_all() -> None:
    groups = with_layers_behind(group_layers(pattern(6, 3, 16, (8, 16)), LENGTH), 6, 2)
    assert [group.layers for group in groups] == [(0, 1, 3, 4), (2, 5, 6, 7)]
    assert [group.together for group in groups] == [2, 1]


@given(st.integers(1, 60), WINDOWS, st.integers(1, 5), st.lists(st.integers(1, 7), min_size=60))
def test_no_sequence_holds_more_than_the_bound(
    num_tokens: int, window: Window, block_size: int, chunks: list[int]
) -> None:
    kv = KVCache(200, block_size, False, [window], 7)
    blocks = kv.open()
    while blocks.num_tokens < num_tokens:
        assert kv.append(blocks, min(blocks.num_tokens + chunks.pop(), num_tokens)) is not None
        assert kv.pool.num_used <= most_blocks(blocks.num_tokens, window, block_size, 7)


@given(st.data(), st.integers(1, 60), st.integers(1, 3), st.sampled_from([1, 2, 4, 100]))
def test_nor_does_one_with_states_however_many_are_forked_from_it(
    data: st.DataObject, prompt_len: int, pages: int, blocks_apart: int
) -> None:
    """Their states are kept besides."""
    size, total = 4, prompt_len + data.draw(st.integers(0, 20))
    most = data.draw(st.sampled_from([1, 7, 100]))
    kv = KVCache(400, size, True, [None, State(pages, blocks_apart * size)], most)
    forks = data.draw(st.sets(st.integers(0, prompt_len // size).map(lambda block: block * size), max_size=4))
    more = len(forks - kv.states.prompt_borders(prompt_len))
    blocks, tokens = kv.open(), list(range(total))
    need = kv.blocks_to_start(kv.match_prefix(blocks, tokens, prompt_len - 1), prompt_len, more)
    kv.states.wanted(blocks, prompt_len, forks)
    while blocks.num_tokens < total:
        chunk = data.draw(st.integers(1, most)) if blocks.num_tokens < prompt_len else 1
        end = min(blocks.num_tokens + chunk, prompt_len if blocks.num_tokens < prompt_len else total)
        assert kv.append(blocks, end) is not None
        kv.register(blocks, tokens[:end])
        held = kv.pool.num_used - len(blocks.tables[0])
        assert held <= most_blocks(total, kv.windows[1], size, most, more)
        assert end > prompt_len or kv.pool.num_used <= need


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
