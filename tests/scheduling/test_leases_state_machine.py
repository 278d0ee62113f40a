"""Random histories of two schedulers, one of which computes prompts for the other: whatever is lost on the way, tokens
are those of one engine alone, what is leased is what was written, and neither side keeps a block.

That what is read was written for these very tokens is asserted by the executor, at each read.
"""

from __future__ import annotations

from collections import Counter

import pytest
from hypothesis import seed, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)
from index_mirror import IndexMirror, index_of
from scheduler_loop import Loop
from toy_model import generate
from transfer_link import ASKED, Link

from engine.kv_transfer.params import KVTransferParams

picks = st.integers(0, 5)  # which one, from the oldest
sides = st.sampled_from(["source", "target"])
STEMS = [[(7 * stem + 3 * position) % 50 for position in range(24)] for stem in range(3)]
seldom = st.sampled_from([False, False, False, True])
once = st.sampled_from([False] * 15 + [True])
prompts = st.builds(
    lambda stem, length, end: STEMS[stem][:length] + end,
    st.integers(0, 2),
    st.integers(0, 24),
    st.lists(st.integers(0, 49), min_size=1, max_size=6),
)


class Transfers(RuleBasedStateMachine):
    def __init__(self, done: Counter[str]) -> None:
        """`done` counts what happened, over all histories."""
        super().__init__()
        self.done = done

    @initialize(
        windows=st.sampled_from([(None,), (None,), (None, 6), (5,)]),
        num_blocks=st.sampled_from([24, 32, 48]),
        num_host_blocks=st.sampled_from([12, 48, 48]),
        depth=st.sampled_from([0, 1]),
    )
    def start(self, windows: tuple[int | None, ...], num_blocks: int, num_host_blocks: int, depth: int) -> None:
        self.link, self.count = Link(), 0
        self.settings = {"windows": windows, "num_blocks": num_blocks, "depth": depth}
        self.host_blocks = {"num_host_blocks": num_host_blocks}
        self.computing: dict[str, list[int]] = {}
        """prompts at the source, for the target"""
        self.handed: list[tuple[list[int], KVTransferParams | None]] = []
        """prompts whose first hop has ended"""
        self.asked: dict[str, set[str]] = {"source": set(), "target": set()}
        """requests whose tokens have to be right"""
        self.written: dict[int, list[list[int | None]]] = {}
        """what leased blocks held when they were leased, by generation"""
        self.mirrors: dict[str, IndexMirror] = {}
        """what who is told of KV events knows"""
        self.begin("source")
        self.begin("target")

    def begin(self, side: str) -> None:
        if side == "source":
            loop = self.link.start_source(**self.settings)
        else:
            loop = self.link.start_target(**self.settings, **self.host_blocks)
        self.mirrors[side] = IndexMirror(loop.kv.block_size)

    def side(self, name: str) -> Loop:
        loop = self.link.source if name == "source" else self.link.target
        assert loop is not None
        return loop

    def name(self) -> str:
        self.count += 1
        return f"r{self.count}"

    # -- rules -------------------------------------------------------------------------------------------------------

    @rule(prompt=prompts, turns=st.sampled_from([0, 2, 4, 4]))
    def compute(self, prompt: list[int], turns: int) -> None:
        """For the target."""
        name = self.name()
        self.computing[name] = prompt
        self.side("source").add(name, prompt, 1, kv_transfer=ASKED)
        self.turn("source", turns)

    @rule(side=sides, turns=st.sampled_from([1, 2, 2, 6]))
    def go_on(self, side: str, turns: int) -> None:
        self.turn(side, turns)

    def turn(self, side: str, turns: int) -> None:
        loop = self.side(side)
        for _ in range(turns):
            loop.turn()
        self.done["steps"] += turns
        source = self.side("source")
        for name in [name for name in self.computing if source.ends[name]]:
            self.handed.append((self.computing.pop(name), source.ends[name][0].kv_transfer))

    @precondition(lambda self: self.handed)
    @rule(
        pick=picks,
        max_tokens=st.integers(1, 8),
        turns=st.integers(0, 2),
        again=st.sampled_from([False, False, False, True]),
    )
    def request(self, pick: int, max_tokens: int, turns: int, again: bool) -> None:
        """`again`: somebody else asks with the same parameters, too."""
        index = pick % len(self.handed)
        prompt, params = self.handed[index] if again else self.handed.pop(index)
        name = self.name()
        self.asked["target"].add(name)
        self.side("target").add(name, prompt, max_tokens, kv_transfer=params)
        self.done["taken over"] += params is not None
        self.turn("target", turns)

    @rule(side=sides, prompt=prompts, times=st.integers(1, 2), max_tokens=st.integers(1, 12))
    def press(self, side: str, prompt: list[int], times: int, max_tokens: int) -> None:
        """Others need the room: caches are evicted, leases give way."""
        name = self.name()
        self.asked[side].add(name)
        self.side(side).add(name, (prompt * times)[:40], max_tokens)
        self.turn(side, 4)

    @precondition(lambda self: self.computing)
    @rule(pick=picks)
    def abort_first_hop(self, pick: int) -> None:
        name = list(self.computing)[pick % len(self.computing)]
        del self.computing[name]
        self.side("source").abort([name])
        self.done["aborted at the source"] += 1

    @precondition(lambda self: self.asked["target"])
    @rule(pick=picks, seldom=seldom)
    def abort(self, pick: int, seldom: bool) -> None:
        """Mostly one that waits for pages."""
        live = [name for name in sorted(self.asked["target"]) if not self.side("target").ends[name]]
        if live and seldom:
            name = live[-1 - pick % len(live)]
            self.asked["target"].remove(name)
            self.side("target").abort([name])
            self.done["aborted at the target"] += 1

    @precondition(lambda self: self.link.asked)
    @rule(pick=picks)
    def read(self, pick: int) -> None:
        came = self.link.deliver(pick % len(self.link.asked))
        self.done["read" if came else "the lease was over"] += 1

    @precondition(lambda self: self.link.asked)
    @rule(pick=picks, pages=st.integers(0, 6), arrived=st.booleans())
    def break_off(self, pick: int, pages: int, arrived: bool) -> None:
        """Before all pages have come, or behind them, so that the source does not hear of it."""
        self.link.deliver(pick % len(self.link.asked), None if arrived else pages, told=False)
        self.done["broken off"] += 1

    @precondition(lambda self: self.link.offered)
    @rule(pick=picks, seldom=seldom)
    def expire(self, pick: int, seldom: bool) -> None:
        if not seldom:
            return
        self.link.expire(list(self.link.offered)[pick % len(self.link.offered)])
        self.done["expired"] += 1

    @precondition(lambda self: self.count > 3)
    @rule(side=sides, once=once)
    def restart(self, side: str, once: bool) -> None:
        """A killed one comes again; the other one goes on."""
        if not once:
            return
        self.check(side)
        self.asked[side].clear()
        if side == "source":
            self.computing.clear()
            self.written.clear()
        self.begin(side)
        self.done[f"{side} restarted"] += 1

    # -- invariants --------------------------------------------------------------------------------------------------

    @invariant()
    def what_is_leased_is_what_was_written(self) -> None:
        """And the two halves of the source agree on what is leased."""
        source = self.side("source")
        assert self.link.offered.keys() == source.scheduler._leases._offered.keys()
        for generation, pages in self.link.offered.items():
            assert all(source.kv.pool.ref_counts[block] for block in pages.values())
            now = [source.executor.slots[block] for block in pages.values()]
            assert self.written.setdefault(generation, [list(slots) for slots in now]) == now

    @invariant()
    def kv_events_tell_what_can_be_found(self) -> None:
        for side, mirror in self.mirrors.items():
            kv = self.side(side).kv
            assert kv.events is not None
            mirror.follow(kv.events.take())
            assert mirror.names(False) == index_of(kv.pool)
            assert kv.host is None or mirror.names(True) == index_of(kv.host.pool)

    def check(self, side: str) -> None:
        """Tokens of whoever has ended, before a side ends."""
        loop = self.side(side)
        self.done["gave way"] += loop.scheduler.stats().kv_leases_gave_way
        for name in self.asked[side]:
            if loop.ends[name]:
                prompt, most = loop.requests[name].prompt_token_ids, loop.requests[name].max_tokens
                assert loop.tokens[name] == generate(prompt, len(prompt) + most, set())[0], name

    def teardown(self) -> None:
        if not hasattr(self, "link"):
            return
        source, target = self.side("source"), self.side("target")
        while source.scheduler.has_work or target.scheduler.has_work or self.link.asked:
            progress = [source.turn(), target.turn()]
            if self.link.asked:
                progress.append(self.link.deliver() or True)
            assert any(progress), "work is left, and nothing was planned"
        while self.link.offered:
            self.link.expire(next(iter(self.link.offered)))
        for side in ("source", "target"):
            self.check(side)
            assert all(self.side(side).ends[name] for name in self.asked[side])
            self.side(side).assert_nothing_leaked()


FEW = settings(max_examples=30, stateful_step_count=60)
ALL = (
    *("taken over", "read", "the lease was over", "broken off", "expired", "gave way", "aborted at the source"),
    *("aborted at the target", "source restarted", "target restarted"),
)


@pytest.mark.timeout(900)
def test_whatever_is_lost_on_the_way_is_computed_and_nobody_keeps_a_block(pytestconfig: pytest.Config) -> None:
    done = Counter[str]()
    wanted = 5_000 if pytestconfig.getoption("exhaustive") else 50
    for _ in range(100):
        run_state_machine_as_test(seed(done.total())(lambda: Transfers(done)), settings=FEW)
        if done["taken over"] >= wanted and all(map(done.get, ALL)):
            return
    raise AssertionError(f"not every case was met: {sorted(done.items())}")
