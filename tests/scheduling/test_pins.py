"""Pinned prefixes: computed once, found by all, never evicted, given back on request, and never in anybody's way."""

from __future__ import annotations

import pytest
from scheduler_loop import Loop
from toy_model import POISON, generate

from engine.core.wire import AddRequest, BeamParams
from engine.errors import InvalidRequestError
from engine.step import RowParams

PREFIX = [1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 1, 2, 3]


def pin(loop: Loop, name: str, prompt: list[int]) -> None:
    """As the front end asks for it: no id comes twice."""
    request = AddRequest(
        request_id=f"pin:{name}:{len(loop.sequences)}",
        prompt_token_ids=prompt,
        params=RowParams(seed=0),
        max_tokens=1,
        pin=name,
    )
    loop.scheduler.add(request)
    loop.sequences[request.request_id] = loop.scheduler._live[request.request_id]


@pytest.mark.parametrize("depth", [0, 1])
@pytest.mark.parametrize("budget", [3, 32])
@pytest.mark.parametrize("windows", [(None,), (5,), (None, 3)])
def test_a_pinned_prefix_outlives_everything_that_wants_its_memory(
    depth: int, budget: int, windows: tuple[int | None, ...]
) -> None:
    loop = Loop(depth=depth, num_blocks=24 * len(windows), budget=budget, windows=windows, max_model_len=40)
    pin(loop, "a", PREFIX)
    loop.run()
    kept = loop.scheduler.stats().kv_blocks_pinned
    assert loop.kv.pool.num_used == kept == loop.kv.blocks_kept(12) > 0
    for i in range(30):  # far more than the pool holds
        loop.add(f"other {i}", [9 - i % 7, 1 + i % 9, *range(10)] * 2, 12)
    loop.run()
    loop.scheduler.reset_prefix_cache()
    loop.add("mine", [*PREFIX, 7, 7], 6)
    loop.run()
    assert loop.cached("mine") == 12
    assert loop.tokens["mine"] == generate([*PREFIX, 7, 7], 21, set())[0]
    loop.scheduler.unpin("a")
    loop.scheduler.unpin("a")
    assert loop.scheduler.stats().kv_blocks_pinned == 0
    loop.assert_nothing_leaked()
    loop.add("later", [*PREFIX, 8], 2)
    loop.run()
    assert loop.cached("later") == 12, "still cached, like any other"


def test_what_can_not_be_pinned_is_refused_and_costs_nothing() -> None:
    loop = Loop(num_blocks=16, max_model_len=48)
    for prompt, word in (([1, 2, 3], "fills no block"), ([1] * 21, "only 4 of 16")):
        with pytest.raises(InvalidRequestError, match=word):
            pin(loop, "a", prompt)
    pin(loop, "a", PREFIX)
    with pytest.raises(InvalidRequestError, match="'a' is pinned already"):
        pin(loop, "a", PREFIX)
    loop.run()
    with pytest.raises(InvalidRequestError, match="'a' is pinned already"):
        pin(loop, "a", PREFIX)
    with pytest.raises(InvalidRequestError, match="only 1 of 16"):
        pin(loop, "b", PREFIX)
    with pytest.raises(InvalidRequestError, match="prefix caching is off"):
        pin(Loop(caching=False), "a", PREFIX)


def test_a_request_that_was_there_first_keeps_its_room() -> None:
    """A search of four beams may take more than the longest sequence."""
    loop = Loop(num_blocks=27, max_model_len=40)
    loop.add("wide", [1, 2, 3, 4, 5], 30, beams=BeamParams(width=3))
    with pytest.raises(InvalidRequestError, match="beside the largest request"):
        pin(loop, "a", PREFIX)
    loop.run()
    pin(loop, "a", PREFIX)
    with pytest.raises(InvalidRequestError, match="needs 25 KV blocks, but there are 24"):
        loop.add("again", [1, 2, 3, 4, 5], 30, beams=BeamParams(width=3))


@pytest.mark.parametrize("how", ["abort", "fault"])
def test_a_pin_whose_prefix_was_not_computed_leaves_nothing(how: str) -> None:
    loop = Loop(budget=4)
    pin(loop, "a", [*PREFIX, POISON] if how == "fault" else PREFIX)
    loop.turn()
    if how == "abort":
        loop.scheduler.abort(["pin:a:0"])
    loop.run()
    assert loop.scheduler.stats().kv_blocks_pinned == 0
    loop.assert_nothing_leaked()
    loop.ends.clear()
    pin(loop, "a", PREFIX)
    loop.run()
    assert loop.scheduler.stats().kv_blocks_pinned == 3


@pytest.mark.parametrize("depth", [0, 1])
@pytest.mark.parametrize("budget", [3, 7, 15])
def test_a_prefix_whose_last_chunk_is_one_token_is_pinned_and_told_of_what_was_cached(depth: int, budget: int) -> None:
    loop = Loop(depth=depth, budget=budget, num_blocks=40)
    pin(loop, "a", [1, 2, 3, 4] * 4)
    loop.run()
    assert loop.scheduler.stats().kv_blocks_pinned == 4
    loop.add("later", [1, 2, 3, 4] * 4 + [9] * (budget + 1), 2)
    loop.run()
    assert loop.cached("later") == 16


def test_a_pin_that_is_given_back_while_it_is_computed_is_not_kept() -> None:
    loop = Loop(budget=4, num_blocks=40)
    pin(loop, "a", [1, 2, 3, 4] * 4)
    loop.turn()
    loop.scheduler.unpin("a")
    loop.run()
    loop.scheduler.unpin("a")
    assert loop.scheduler.stats().kv_blocks_pinned == 0
    loop.assert_nothing_leaked()
