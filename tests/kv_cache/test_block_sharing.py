"""Single properties of sharing and eviction that a reader should see spelled out."""

from __future__ import annotations

import pytest

from engine.errors import ConfigError, EngineError
from engine.kv_cache.block_pool import BlockPool
from engine.kv_cache.hash_chain import HashChain
from engine.kv_cache.kv_cache import KVCache
from engine.kv_cache.sequence_blocks import NO_GROWTH, SequenceBlocks


def filled(kv: KVCache, tokens: list[int], salt: str | None = None) -> SequenceBlocks:
    blocks = kv.open(salt)
    assert kv.append(blocks, len(tokens)) is not None
    kv.register(blocks, tokens)
    return blocks


def hit(kv: KVCache, tokens: list[int], salt: str | None = None) -> int:
    return kv.match_prefix(kv.open(salt), tokens, len(tokens) - 1).num_tokens


def test_fork_then_write_copies_exactly_one_block() -> None:
    kv = KVCache(8, 4, True)
    parent = filled(kv, [0] * 10)
    child = kv.fork(parent)
    last = parent.tables[0][-1]
    growth = kv.append(child, 11)
    assert growth is not None
    assert (growth.start, growth.copies) == (2, [(last, child.tables[0][-1])])
    assert kv.stats().used == 4
    assert kv.append(parent, 11) is NO_GROWTH, "the last holder writes in place"


def test_fork_at_a_block_border_copies_nothing() -> None:
    kv = KVCache(8, 4, True)
    parent = filled(kv, [0] * 8)
    growth = kv.append(kv.fork(parent), 9)
    assert growth is not None and (growth.start, growth.copies) == (2, [])


def test_append_that_does_not_fit_changes_nothing() -> None:
    kv = KVCache(4, 4, True)
    parent = filled(kv, [0] * 6)
    child = kv.fork(parent)
    before = [list(child.tables[0]), child.num_tokens, list(kv.pool.ref_counts)]
    assert kv.append(child, 16) is None, "two new blocks and one copy, but two are free"
    assert [list(child.tables[0]), child.num_tokens, list(kv.pool.ref_counts)] == before
    assert kv.append(child, 12) is not None


def test_tails_are_evicted_before_heads() -> None:
    kv = KVCache(4, 2, True)
    tokens = [1, 2, 3, 4, 5, 6, 7, 8]
    kv.free(filled(kv, tokens))
    for evicted in range(1, 4):
        other = kv.open("other")
        kv.append(other, 2 * evicted)
        assert hit(kv, [*tokens, 9]) == 8 - 2 * evicted
        kv.free(other)


def test_least_recently_released_is_evicted_first_and_a_hit_renews() -> None:
    kv = KVCache(3, 2, True)
    a, b, c = [1, 1, 0], [2, 2, 0], [3, 3, 0]
    for tokens in (a, b, c):
        kv.free(filled(kv, tokens[:2]))
    again = kv.open()
    kv.adopt(again, kv.match_prefix(again, a, 2))
    kv.free(again)
    kv.append(kv.open("other"), 2)
    assert [hit(kv, tokens) for tokens in (a, b, c)] == [2, 0, 2]


def test_blocks_that_hold_nothing_go_before_cached_ones() -> None:
    kv = KVCache(3, 2, True)
    kv.free(filled(kv, [1, 1]))
    partial = filled(kv, [2])
    kv.free(partial)
    kv.append(kv.open("other"), 4)
    assert hit(kv, [1, 1, 0]) == 2


def test_equal_tokens_after_other_parents_are_not_shared() -> None:
    kv = KVCache(8, 2, True)
    filled(kv, [1, 1, 5, 5])
    assert hit(kv, [2, 2, 5, 5, 0]) == 0
    assert hit(kv, [5, 5, 0]) == 0
    assert hit(kv, [1, 1, 5, 5, 0]) == 4


def test_tokens_that_are_not_known_yet_are_not_findable() -> None:
    kv = KVCache(8, 2, True)
    blocks = filled(kv, [1, 1, 2, 2])
    kv.append(blocks, 6)
    kv.register(blocks, [1, 1, 2, 2, 3])
    assert hit(kv, [1, 1, 2, 2, 3, 3, 0]) == 4
    kv.register(blocks, [1, 1, 2, 2, 3, 3])
    assert hit(kv, [1, 1, 2, 2, 3, 3, 0]) == 6


def test_known_tokens_without_kv_are_not_findable() -> None:
    kv = KVCache(8, 2, True)
    blocks = kv.open()
    kv.append(blocks, 3)
    kv.register(blocks, [1, 1, 2, 2])
    assert hit(kv, [1, 1, 2, 2, 0]) == 2


def test_caching_off_finds_nothing_and_hashes_nothing() -> None:
    kv = KVCache(8, 2, False)
    blocks = filled(kv, [1, 1, 2, 2])
    assert hit(kv, [1, 1, 2, 2, 0]) == 0 and blocks.chain.digests == []


def test_every_block_of_a_sequence_is_hashed_once() -> None:
    tokens = CountingList(range(100))
    chain = HashChain(4, None)
    for index in (0, 3, 3, 24, 10, 24):
        chain.digest(index, tokens)
    assert tokens.read == 100


class CountingList(list[int]):
    read = 0

    def __getitem__(self, key):  # type: ignore[no-untyped-def, override]  # counts what is read, nothing else
        part = super().__getitem__(key)
        self.read += len(part)
        return part


@pytest.mark.parametrize(
    ("first", "second"),
    [((None, [1, 2]), ("", [1, 2])), (("a", [1, 2]), ("b", [1, 2])), ((None, [1, 2]), (None, [2, 1]))],
)
def test_names_differ_by_salt_and_order(
    first: tuple[str | None, list[int]], second: tuple[str | None, list[int]]
) -> None:
    one, other = (HashChain(2, salt).digest(0, tokens) for salt, tokens in (first, second))
    assert one != other and len(one) == 32


def test_released_too_often_and_taken_from_an_empty_pool_is_an_error() -> None:
    pool = BlockPool(1, True)
    block = pool.allocate()
    with pytest.raises(EngineError, match="all 1"):
        pool.allocate()
    pool.release(block)
    with pytest.raises(EngineError, match="more often"):
        pool.release(block)


@pytest.mark.parametrize("shape", [(0, 1, 1), (1, 0, 1), (1, 1, 0)])
def test_an_empty_cache_is_refused(shape: tuple[int, int, int]) -> None:
    with pytest.raises(ConfigError):
        KVCache(shape[0], shape[1], True, [None] * shape[2])
