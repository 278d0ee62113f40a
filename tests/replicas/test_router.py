"""Where requests go, and what is known of replicas without asking them."""

from __future__ import annotations

from collections import Counter
from random import Random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from engine.core.wire import AddRequest, CoreStats, KVDigests
from engine.kv_cache.hash_chain import HashChain
from engine.replicas.prefix_index import PrefixIndex
from engine.replicas.router import OWN_WEIGHT, Place, Router
from engine.step import RowParams

BLOCK = 16


def request(name: str, prompt: list[int], max_tokens: int = 8, salt: str | None = None) -> AddRequest:
    return AddRequest(
        request_id=name, prompt_token_ids=prompt, params=RowParams(seed=0), max_tokens=max_tokens, cache_salt=salt
    )


def router(replicas: int = 2) -> Router:
    made = Router(BLOCK)
    for replica in range(replicas):
        made.add(replica)
    return made


def digests(prompt: list[int], salt: str | None = None) -> list[bytes]:
    blocks = len(prompt) // BLOCK
    return HashChain(BLOCK, salt).digests_of(blocks, prompt)[:blocks]


def send(to: Router, message: AddRequest) -> Place:
    place = to.places(message)[0]
    to.sent(message, place)
    return place


def test_a_request_goes_where_its_prefix_is() -> None:
    prompt = list(range(100))
    for holder in (0, 1):
        routed = router()
        routed.index.observe(holder, KVDigests(stored=digests(prompt)))
        first, second = routed.places(request("a", prompt))
        assert (first.replica, first.cached_tokens, second.cached_tokens) == (holder, 96, 0)
        assert first.work == second.work - OWN_WEIGHT * 96


def test_a_hit_leaves_a_token_and_a_salt_keeps_prefixes_apart() -> None:
    prompt = list(range(32))
    routed = router(1)
    routed.index.observe(0, KVDigests(stored=digests(prompt)))
    assert routed.places(request("a", prompt))[0].cached_tokens == 16
    assert routed.places(request("b", prompt, salt="mine"))[0].cached_tokens == 0


def test_a_burst_that_begins_alike_finds_together_before_anything_is_computed() -> None:
    routed = router()
    head = list(range(800))
    first = send(routed, request("a", [*head, 1]))
    others = [send(routed, request(f"b{index}", [*head, 2 + index])) for index in range(5)]
    assert {place.replica for place in others} == {first.replica}
    assert {place.cached_tokens for place in others} == {800}


def test_load_outweighs_a_prefix_when_it_costs_more() -> None:
    routed = router()
    head = list(range(320))
    routed.index.observe(0, KVDigests(stored=digests(head)))
    chosen = Counter(send(routed, request(f"r{index}", [*head, index], max_tokens=64)).replica for index in range(40))
    assert chosen[0] >= chosen[1] >= 12  # the other one computes the head once, and is as good from then on


def test_what_has_been_computed_is_no_work_any_more() -> None:
    routed = router()
    place = send(routed, request("a", list(range(500)), max_tokens=4))
    other = 1 - place.replica
    assert routed.places(request("b", [7] * 400, max_tokens=4))[0].replica == other
    routed.began("a")
    works = {place.replica: place.work for place in routed.places(request("b", [7] * 400, max_tokens=4))}
    assert works[place.replica] == works[other] + 4
    routed.sequence_ended("a", 4)
    works = {place.replica: place.work for place in routed.places(request("b", [7] * 400, max_tokens=4))}
    assert works[place.replica] == works[other]
    assert routed.is_idle(place.replica)


def test_a_cache_without_room_counts() -> None:
    routed = router()
    full = CoreStats(kv_blocks_total=10, kv_blocks_used=9)
    routed.observe(0, full, None)
    routed.observe(1, CoreStats(kv_blocks_total=10, kv_blocks_used=0), None)
    assert routed.places(request("a", [1] * 100))[0].replica == 1


def test_ties_go_by_the_prompts_beginning() -> None:
    random = Random(1)
    heads = [[random.randrange(1000) for _ in range(BLOCK)] for _ in range(300)]
    before = [router(4).places(request("a", [*head, 5]))[0].replica for head in heads]
    again = [router(4).places(request("b", [*head, 6, 7]))[0].replica for head in heads]
    assert before == again
    assert all(50 < count < 100 for count in Counter(before).values())
    smaller = router(4)
    smaller.drain(3)
    moved = [smaller.places(request("a", [*head, 5]))[0].replica for head in heads]
    assert all(now == then for now, then in zip(moved, before, strict=True) if then != 3)


def test_short_prompts_are_spread_too() -> None:
    chosen = Counter(router(2).places(request("a", [index]))[0].replica for index in range(100))
    assert min(chosen.values()) > 25


def test_a_removed_replica_is_forgotten_and_says_what_it_had() -> None:
    routed = router()
    prompt = list(range(64))
    routed.index.observe(0, KVDigests(stored=digests(prompt)))
    assert send(routed, request("a", [*prompt, 1])).replica == 0
    assert send(routed, request("b", [*prompt, 2])).replica == 0
    assert routed.remove(0) == ["a", "b"]
    assert [(place.replica, place.cached_tokens) for place in routed.places(request("c", [*prompt, 3]))] == [(1, 0)]
    assert len(routed.index) == 0


def test_an_unknown_request_is_an_error() -> None:
    with pytest.raises(KeyError):
        router().ended("a")


EVENTS = st.lists(
    st.tuples(st.integers(0, 2), st.booleans(), st.sets(st.integers(0, 9)), st.sets(st.integers(0, 9))), max_size=20
)


@given(EVENTS, st.lists(st.integers(0, 9), max_size=6))
def test_the_index_knows_what_replicas_have_told(events: list[tuple[int, bool, set[int], set[int]]], asked: list[int]):  # type: ignore[no-untyped-def]
    index = PrefixIndex()
    truth: list[set[bytes]] = [set(), set(), set()]
    for replica, cleared, removed, stored in events:
        names = KVDigests(
            stored=[bytes([name]) for name in stored - removed],
            removed=[bytes([name]) for name in removed],
            cleared=cleared and replica == 1,
        )
        index.observe(replica, names)
        if names.cleared:
            truth[replica].clear()
        truth[replica] = truth[replica] - set(names.removed) | set(names.stored)
    wanted = {}
    for replica, names_there in enumerate(truth):
        found = 0
        while found < len(asked) and bytes([asked[found]]) in names_there:
            found += 1
        wanted[replica] = found
    assert index.matched([bytes([name]) for name in asked], range(3)) == wanted
    assert len(index) == len(set().union(*truth))
