"""What the scheduler itself refuses, or gives up: what no admission has looked at, and who waits for too long."""

from __future__ import annotations

from typing import Any

import pytest
from msgspec.structs import replace
from scheduler_loop import Loop
from toy_model import POISON

from engine.core.wire import AddRequest, BeamParams, Follower
from engine.errors import InvalidRequestError, QueueFullError
from engine.request import Tenant
from engine.step import RowParams


def test_followers_count_as_waiting() -> None:
    loop = Loop(rows=1, max_waiting=3)
    loop.add("running", [1], 8)
    loop.turn()
    loop.add("a", [2], 2)
    with pytest.raises(QueueFullError, match="--max-waiting 3") as full:
        loop.add("b", [3], 2, followers=["b1", "b2"])
    assert full.value.retry_after_s == 1.0
    loop.add("c", [4], 2, followers=["c1"])
    assert loop.scheduler.stats().waiting == 3
    loop.run()
    loop.assert_nothing_leaked()


def test_who_finds_a_row_free_need_not_find_a_place_to_wait() -> None:
    loop = Loop(rows=4, max_waiting=1)
    for name in "abcde":  # of whom nobody has started yet
        loop.add(name, [1], 4)
    with pytest.raises(QueueFullError, match=r"1 sequence waits already for a row \(--max-waiting 1\)"):
        loop.add("f", [1], 4)
    loop.turn()
    with pytest.raises(QueueFullError, match="1 sequence waits already"):
        loop.add("f", [1], 4)
    loop.run()
    loop.assert_nothing_leaked()


def test_a_flood_leaves_others_a_place_to_wait() -> None:
    loop = Loop(rows=1, max_waiting=8, policy="fair")
    loop.add("running", [1], 8, tenant=Tenant("flood"))
    loop.turn()
    for number in range(7):
        loop.add(f"flood{number}", [2], 2, tenant=Tenant("flood"))
    with pytest.raises(QueueFullError, match=r"7 sequences wait of this client already, .*--max-waiting 8"):
        loop.add("one more", [2], 2, tenant=Tenant("flood"))
    loop.add("honest", [3], 2, tenant=Tenant("honest"))
    with pytest.raises(QueueFullError, match="8 sequences wait already"):
        loop.add("late", [3], 2, tenant=Tenant("late"))
    loop.run()
    loop.assert_nothing_leaked()


def test_a_request_gives_up_waiting_only_before_it_has_begun() -> None:
    loop = Loop(rows=1)
    loop.add("running", [1], 4)
    loop.turn()
    loop.add("waiting", [2], 4, followers=["too"])
    assert loop.scheduler.has_begun("running") and not loop.scheduler.has_begun("waiting")
    loop.receive(loop.scheduler.give_up("running"))
    loop.receive(loop.scheduler.give_up("waiting"))
    loop.run()
    ends = [loop.ends[name][0] for name in ("running", "waiting", "too")]
    assert [(end.finish_reason, end.error_kind) for end in ends] == [
        ("length", None),
        ("error", "queue_full"),
        ("error", "queue_full"),
    ]
    assert loop.scheduler.has_begun("waiting"), "what is over waits for nothing"
    loop.assert_nothing_leaked()


@pytest.mark.parametrize(
    ("field", "changes"),
    [
        ("prompt", {"prompt_token_ids": [5, -1]}),
        ("prompt", {"prompt_token_ids": [5, 1000]}),
        ("seed", {"params": RowParams(seed=2**63)}),
        ("temperature", {"params": RowParams(seed=0, temperature=float("nan"))}),
        ("repetition_penalty", {"params": RowParams(seed=0, repetition_penalty=5e-324)}),
        ("logit_bias", {"params": RowParams(seed=0, logit_bias={2**40: 1.0})}),
        ("allowed_token_ids", {"params": RowParams(seed=0, allowed_token_ids=[-7])}),
        ("bad_words", {"params": RowParams(seed=0, bad_words=[[1, 2**31]])}),
        ("logprobs", {"params": RowParams(seed=0, logprobs=-2)}),
        ("priority", {"priority": 2**63}),
        ("seed", {"followers": [Follower(request_id="b", seed=-(2**70))]}),
        ("n", {"followers": [Follower(request_id=str(i), seed=0) for i in range(128)]}),
        ("n", {"beams": BeamParams(width=1), "followers": [Follower(request_id="b", seed=0)]}),
        ("best_of", {"beams": BeamParams(width=0)}),
        ("length_penalty", {"beams": BeamParams(width=2, length_penalty=float("inf"))}),
    ],
)
def test_what_no_admission_lets_pass_is_refused_before_the_device_sees_it(field: str, changes: dict[str, Any]) -> None:
    loop = Loop()
    arrivals = loop.scheduler._arrivals
    arrivals._config = replace(arrivals._config, vocab_size=1000)
    request = AddRequest(request_id="a", prompt_token_ids=[1], params=RowParams(seed=0), max_tokens=3)
    with pytest.raises(InvalidRequestError) as caught:
        loop.scheduler.add(replace(request, **changes))
    assert caught.value.field == field
    assert not loop.scheduler.has_work


@pytest.mark.parametrize("how", ["gives up", "fails"])
def test_a_request_that_ends_in_an_error_takes_nobody_elses_prefix_with_it(how: str) -> None:
    loop = Loop(rows=1, num_blocks=64)
    prefix = [1, 2, 3, 4, 5, 6, 7, 8]
    loop.add("first", [*prefix, 9], 2)
    loop.run()
    if how == "fails":
        loop.add("victim", [*prefix, POISON, 9, 9, 9, 9], 4)
        loop.run()
    else:
        loop.add("running", [0], 6)
        loop.turn()
        loop.add("victim", [*prefix, 9, 9], 4)
        loop.turn()
        loop.receive(loop.scheduler.give_up("victim"))
        loop.run()
    assert loop.reason("victim") == "error"
    loop.add("again", [*prefix, 9], 2)
    loop.run()
    assert loop.cached("again") == 8
    loop.assert_nothing_leaked()
