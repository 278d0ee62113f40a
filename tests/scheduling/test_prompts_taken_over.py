"""Prompts that one scheduler computes and another one takes over: the tokens are those of one alone, whatever is lost
on the way, and neither keeps a block."""

from __future__ import annotations

from random import Random

import pytest
from index_mirror import IndexMirror, index_of
from replaying_executor import generate
from scheduler_loop import Loop

from engine.kv_transfer.interface import FetchDone, LeaseEnded
from engine.kv_transfer.params import KVTransferParams

ASKED = KVTransferParams(do_remote_decode=True)


class Link:
    """Both ends of a transport: the pages that `source` leases come into `target`'s host blocks when it is told so."""

    most_leases = 256

    def __init__(self) -> None:
        self.source: Loop | None = None
        self.target: Loop | None = None
        self.offered: dict[int, dict[bytes, int]] = {}
        self.asked: list[tuple[int, int, dict[bytes, int]]] = []

    def offer(self, generation: int, pages: dict[bytes, int]) -> KVTransferParams:
        self.offered[generation] = dict(pages)
        return KVTransferParams(
            do_remote_prefill=True,
            remote_engine_id="source",
            remote_request_id=str(generation),
            remote_host="here",
            remote_port=1,
        )

    def withdraw(self, generation: int) -> None:
        self.offered.pop(generation, None)

    def fetch(self, number: int, source: KVTransferParams, pages: dict[bytes, int]) -> None:
        self.asked.append((number, int(source.remote_request_id or 0), pages))

    def expire(self, generation: int) -> None:
        assert self.source is not None
        if self.offered.pop(generation, None) is not None:
            self.source.scheduler.transferred(LeaseEnded(generation=generation, expired=True))

    def deliver(self, index: int = 0, breaks: bool = False) -> None:
        """What was asked for comes, or breaks half-way."""
        assert self.source is not None and self.target is not None
        number, generation, pages = self.asked.pop(index)
        there = self.offered.get(generation, {})
        found = [key for key in pages if key in there]
        for key in found[: len(found) // 2 if breaks else None]:
            self.target.executor.host_slots[pages[key]] = list(self.source.executor.slots[there[key]])
        lost = breaks or len(found) < len(pages)
        if not lost and self.offered.pop(generation, None) is not None:
            self.source.scheduler.transferred(LeaseEnded(generation=generation))
        if number:
            done = FetchDone(number=number, error="lost" if lost else None, size_bytes=len(pages))
            self.target.receive(self.target.scheduler.transferred(done))


def pair(windows: tuple[int | None, ...] = (None,), **more: int) -> tuple[Loop, Loop, Link]:
    link = Link()
    link.source = Loop(windows=windows, connector=link, **{"num_host_blocks": 0, **more})
    link.target = Loop(windows=windows, connector=link, **{"num_host_blocks": 48, **more})
    return link.source, link.target, link


def computed_for(source: Loop, name: str, prompt: list[int]) -> KVTransferParams | None:
    source.add(name, prompt, 1, kv_transfer=ASKED)
    source.run()
    (end,) = source.ends[name]
    return end.kv_transfer


@pytest.mark.parametrize("windows", [(None,), (None, 6), (6, 10)])
@pytest.mark.parametrize("prompt_len", [1, 4, 5, 8, 31, 32, 33])
def test_all_but_the_last_block_comes_and_the_tokens_are_those_of_one_engine(
    windows: tuple[int | None, ...], prompt_len: int
) -> None:
    source, target, link = pair(windows)
    prompt = [7 * i % 50 for i in range(prompt_len)]
    params = computed_for(source, "p", prompt)
    assert (params is not None) == (prompt_len > 4), "less than a block is no lease"
    target.add("d", prompt, 8, kv_transfer=params)
    if params is not None:
        assert not target.turn() and not target.scheduler.has_work, "it waits, and nobody spins"
        link.deliver()
        source.scheduler.stats()
    target.run()
    assert target.tokens["d"] == generate(prompt, prompt_len + 8, set())[0]
    assert target.cached("d") == (prompt_len - 1) // 4 * 4
    source.assert_nothing_leaked()
    target.assert_nothing_leaked()


def test_only_what_is_missing_is_fetched() -> None:
    source, target, link = pair()
    prompt = list(range(30))
    params = computed_for(source, "p", prompt)
    target.add("before", prompt[:17], 2)
    target.run()
    target.add("d", prompt, 4, kv_transfer=params)
    assert len(link.asked[0][2]) == 7 - 4
    link.deliver()
    target.add("again", prompt, 4, kv_transfer=params)
    assert link.asked[-1][0] == 0 and not link.asked[-1][2], "the lease is given back"
    target.run()
    assert target.tokens["d"] == target.tokens["again"] == generate(prompt, 34, set())[0]
    target.assert_nothing_leaked()


def test_nothing_lands_in_a_block_that_a_step_in_flight_reads() -> None:
    source, target, link = pair(num_blocks=24, num_host_blocks=8)
    prompt = list(range(20))
    params = computed_for(source, "p", prompt)
    target.add("busy", [3] * 9, 6)
    target.turn()
    assert target.pending
    target.add("d", prompt, 4, kv_transfer=params)
    assert not link.asked
    while not link.asked:
        assert target.turn()
    link.deliver()
    target.run()
    assert target.tokens["d"] == generate(prompt, 24, set())[0]


def test_leases_give_way_to_who_runs_here() -> None:
    source, _, link = pair(num_blocks=16)
    for index in range(4):
        assert computed_for(source, f"p{index}", [index] * 17) is not None
    assert source.scheduler.stats().kv_leases == 2, "half of the pool"
    source.add("long", [9] * 40, 20)
    source.run()
    assert source.tokens["long"] == generate([9] * 40, 60, set())[0]
    assert source.scheduler.stats().kv_leases == 0 and not link.offered
    source.assert_nothing_leaked()


@pytest.mark.parametrize("stop", [True, False])
def test_who_does_not_end_well_leases_nothing(stop: bool) -> None:
    source, _, link = pair()
    source.add("p", [1] * 20, 5, kv_transfer=ASKED)
    source.turn()
    if stop:
        source.abort(["p"])
    else:
        source.add("sick", [10_000] * 20, 1, kv_transfer=ASKED)
        source.abort(["p"])
    source.run()
    assert not link.offered
    source.assert_nothing_leaked()


@pytest.mark.parametrize("seed", range(8))
def test_whatever_is_lost_on_the_way_is_computed_and_nobody_keeps_a_block(seed: int) -> None:
    """Aborts on both sides, leases that expire or give way, transfers that break, in every order: 1,000 and more."""
    play(seed, 150)


@pytest.mark.exhaustive
def test_of_ten_thousand_none_is_lost() -> None:
    for seed in range(100, 140):
        play(seed, 300)


def play(seed: int, requests: int) -> None:
    random = Random(seed)
    windows = random.choice([(None,), (None, 6), (5,)])
    source, target, link = pair(windows, num_blocks=random.choice([40, 64]), depth=random.choice([0, 1]))
    stems = [[random.randrange(50) for _ in range(24)] for _ in range(3)]
    waiting: dict[str, list[int]] = {}
    prompts: dict[str, list[int]] = {}
    aborted: set[str] = set()
    mirrors = {loop: IndexMirror(loop.kv.block_size) for loop in (source, target)}
    started = 0
    while started < requests or waiting or source.scheduler.has_work or target.scheduler.has_work or link.asked:
        for loop in (source, target):
            if random.random() < 0.7:
                loop.turn()
        if started < requests and random.random() < 0.3:
            prompt = random.choice(stems)[: random.randrange(1, 24)] + [random.randrange(50) for _ in range(5)]
            waiting[f"p{started}"] = prompt
            source.add(f"p{started}", prompt, 1, kv_transfer=ASKED)
            started += 1
        if waiting and random.random() < 0.05:
            source.abort([random.choice(sorted(waiting))])
        for name in [name for name in waiting if source.ends[name]]:
            prompts[name] = waiting.pop(name)
            target.add(name, prompts[name], random.randrange(1, 9), kv_transfer=source.ends[name][0].kv_transfer)
        if prompts and random.random() < 0.06:
            name = random.choice(sorted(prompts))
            aborted.add(name)
            target.abort([name])
        if link.offered and random.random() < 0.05:
            link.expire(random.choice(sorted(link.offered)))
        if link.asked and random.random() < 0.4:
            link.deliver(random.randrange(len(link.asked)), breaks=random.random() < 0.2)
        for loop, mirror in mirrors.items():
            assert loop.kv.events is not None
            mirror.follow(loop.kv.events.take())
            tiers = (loop.kv.pool, loop.kv.host.pool if loop.kv.host is not None else None)
            assert all(pool is None or mirror.names(bool(i)) == index_of(pool) for i, pool in enumerate(tiers))
    while link.offered:
        link.expire(next(iter(link.offered)))
    for name, prompt in prompts.items():
        if name not in aborted:
            total = len(prompt) + target.requests[name].max_tokens
            assert target.tokens[name] == generate(prompt, total, set())[0], name
    stats = target.scheduler.stats()
    assert stats.kv_fetches > 5 and stats.kv_fetch_failures > 2 and stats.host_blocks_used == 0
    source.assert_nothing_leaked()
    target.assert_nothing_leaked()
