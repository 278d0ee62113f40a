"""Prompts that one scheduler computes and another one takes over: the tokens are those of one alone, and neither keeps
a block. `test_leases_state_machine.py` has what may be lost on the way."""

from __future__ import annotations

import pytest
from scheduler_loop import Loop
from toy_model import generate
from transfer_link import ASKED, Link

from engine.kv_transfer.params import KVTransferParams


def pair(windows: tuple[int | None, ...] = (None,), **more: int) -> tuple[Loop, Loop, Link]:
    link = Link()
    return link.start_source(windows=windows, **more), link.start_target(windows=windows, **more), link


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


def test_where_there_is_no_room_the_lease_is_given_back_and_the_reason_told() -> None:
    source, target, link = pair(num_blocks=24, num_host_blocks=4)
    prompt = list(range(30))
    target.add("d", prompt, 4, kv_transfer=computed_for(source, "p", prompt))
    assert [(number, pages) for number, _, pages in link.asked] == [(0, {})]
    assert target.scheduler.stats().kv_fetch_failures == 1 and "--swap-space" in link.failures[0]
    target.run()
    assert target.tokens["d"] == generate(prompt, 34, set())[0]
