"""Whoever follows the events of a prefix cache knows what it finds, and what that holds."""

from __future__ import annotations

from collections import Counter

import pytest
from hypothesis import seed
from hypothesis.stateful import initialize, invariant, run_state_machine_as_test
from index_mirror import IndexMirror, index_of
from test_kv_cache_state_machine import FEW, KVCacheMachine

from engine.core.kv_reports import digests_of
from engine.kv_cache.events import Cleared, KVEvent, Removed, Stored
from engine.kv_cache.kv_cache import KVCache
from engine.kv_cache.sequence_blocks import SequenceBlocks
from engine.kv_cache.swapping import Leaving, swap_in, swap_out

TOLD = ("stored on the host", "cleared", "several blocks in one event", "of other groups")


class FollowedMachine(KVCacheMachine):
    """Histories as those of the cache's own test, and beside it two copies that know nothing but events."""

    @initialize()
    def begin_to_follow(self) -> None:
        self.mirror: IndexMirror | None = None
        self.digests: set[bytes] = set()

    @invariant()
    def who_follows_the_events_knows_what_is_found(self) -> None:
        if not hasattr(self, "kv") or not hasattr(self, "digests"):
            return
        kv, self.mirror = self.kv, self.mirror or IndexMirror(self.size)
        assert kv.events is not None
        events = kv.events.take()
        self.mirror.follow(events)
        on_device, on_host = index_of(kv.pool), index_of(kv.host.pool) if kv.host is not None else set()
        assert self.mirror.names(on_host=False) == on_device
        assert self.mirror.names(on_host=True) == on_host
        self.follow_digests(events)
        assert self.digests == {key for key in on_device | on_host if len(key) == 32}
        for event in events:
            self.done["stored on the host"] += isinstance(event, Stored) and event.on_host
            self.done["cleared"] += isinstance(event, Cleared)
            self.done["several blocks in one event"] += not isinstance(event, Cleared) and len(event.digests) > 1
            self.done["of other groups"] += not isinstance(event, Cleared) and event.group > 0

    def follow_digests(self, events: list[KVEvent]) -> None:
        told = digests_of(events, self.kv)
        if told is not None:
            assert set(told.stored).isdisjoint(told.removed)
            self.digests = (set() if told.cleared else self.digests) - set(told.removed) | set(told.stored)


@pytest.mark.timeout(900)
def test_a_copy_that_knows_only_events_equals_the_index(pytestconfig: pytest.Config) -> None:
    done = Counter[str]()
    wanted = 60_000 if pytestconfig.getoption("exhaustive") else 3_000
    while done["append"] + done["free"] + done["reuse"] + done["tell"] < wanted:
        run_state_machine_as_test(seed(done.total())(lambda: FollowedMachine(done, keeps_events=True)), settings=FEW)
    assert all(map(done.get, TOLD)), f"not every rare case was met: {sorted(done.items())}"


def filled(kv: KVCache, tokens: list[int], salt: str | None = None) -> SequenceBlocks:
    blocks = kv.open(salt)
    assert kv.append(blocks, len(tokens)) is not None
    kv.register(blocks, tokens)
    return blocks


def taken(kv: KVCache) -> list[KVEvent]:
    assert kv.events is not None
    return kv.events.take()


def test_consecutive_blocks_are_one_event_with_their_tokens_and_what_they_follow() -> None:
    kv = KVCache(8, 2, True, keeps_events=True)
    blocks = filled(kv, [1, 2, 3, 4, 5], salt="s")
    names = blocks.chain.digests
    assert taken(kv) == [Stored(False, 0, names[:2], None, [1, 2, 3, 4], "s")]
    assert kv.append(blocks, 6) is not None
    kv.register(blocks, [1, 2, 3, 4, 5, 6])
    assert taken(kv) == [Stored(False, 0, names[2:], names[1], [5, 6], None)]
    filled(kv, [1, 2, 3, 4], salt="s")
    assert taken(kv) == [], "somebody else holds the same"


def test_what_lies_between_blocks_that_are_found_already_is_an_event_of_its_own() -> None:
    kv = KVCache(9, 1, True, keeps_events=True)
    blocks = filled(kv, [1, 2, 3])
    names = blocks.chain.digests
    kv.pool.forget(names[0])
    kv.pool.forget(names[2])
    taken(kv)
    filled(kv, [1, 2, 3, 4])
    assert taken(kv) == [
        Stored(False, 0, names[:1], None, [1], None),
        Stored(False, 0, [names[2], taken_name(kv, [1, 2, 3, 4])], names[1], [3, 4], None),
    ]


def taken_name(kv: KVCache, tokens: list[int]) -> bytes:
    return kv.open().chain.digest(len(tokens) // kv.block_size - 1, tokens)


def test_what_is_evicted_is_removed_and_with_a_host_tier_stored_there_before() -> None:
    for num_host_blocks in (0, 4):
        kv = KVCache(2, 2, True, num_host_blocks=num_host_blocks, keeps_events=True)
        first = filled(kv, [1, 1, 2, 2])
        names = first.chain.digests.copy()
        kv.free(first)
        taken(kv)
        other = filled(kv, [3, 3])
        assert [type(event) for event in taken(kv)] == [Stored] * bool(num_host_blocks) + [Removed, Stored]
        kv.free(other)
    hit = kv.match_prefix(again := kv.open(), [1, 1, 2, 2, 5], 4)
    kv.adopt(again, hit)
    last = taken(kv)[-1]
    assert last == Stored(False, 0, names[1:], names[0], [2, 2], None), "what comes back is told with its tokens"


def test_a_sequence_that_is_swapped_out_and_in_is_told_of_in_both_tiers() -> None:
    kv = KVCache(4, 1, True, (None, None), num_host_blocks=8, keeps_events=True)
    blocks = filled(kv, [1, 2])
    assert kv.host is not None
    assert {event.group for event in taken(kv) if isinstance(event, Stored)} == {0, 1}
    assert swap_out(kv, kv.host, [Leaving(blocks, 2)])
    stored = [event for event in taken(kv) if isinstance(event, Stored)]
    assert {(event.on_host, event.group) for event in stored} == {(True, 0), (True, 1)}
    for digest in blocks.chain.digests:
        kv.pool.forget(digest)
    taken(kv)
    swap_in(kv, kv.host, [blocks])
    assert taken(kv) == [Stored(False, 0, blocks.chain.digests, None, [1, 2], None)], "group 1 was there still"


def test_a_reset_clears_all_or_says_what_went() -> None:
    kv = KVCache(4, 1, True, keeps_events=True)
    filled(kv, [1])
    unused = filled(kv, [2])
    kv.free(unused)
    taken(kv)
    kv.reset_prefix_cache()
    assert taken(kv) == [Removed(False, 0, unused.chain.digests)], "a sequence holds the other one"
    kv = KVCache(4, 1, True, keeps_events=True)
    kv.free(filled(kv, [1]))
    kv.reset_prefix_cache()
    assert taken(kv) == [Cleared()]


def test_what_comes_and_goes_between_two_reports_is_told_as_gone() -> None:
    kv = KVCache(4, 1, True, keeps_events=True)
    kept, gone = filled(kv, [1]), filled(kv, [2])
    kv.forget(gone, 0)
    told = digests_of(taken(kv), kv)
    assert told is not None and (told.stored, told.removed) == (kept.chain.digests, gone.chain.digests)
    kv.forget(kept, 0)
    kv.free(gone)
    kv.free(kept)
    kv.reset_prefix_cache()
    kept = filled(kv, [1])
    told = digests_of(taken(kv), kv)
    assert told is not None and (told.stored, told.removed, told.cleared) == (kept.chain.digests, [], True)


def test_nobody_who_takes_no_events_pays_for_them() -> None:
    kv = KVCache(2, 1, True, num_host_blocks=2)
    for token in range(4):
        kv.free(filled(kv, [token]))
    kv.reset_prefix_cache()
    assert kv.events is None
