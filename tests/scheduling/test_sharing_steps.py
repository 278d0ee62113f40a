"""Prompts share steps: nobody waits for all of somebody else's, nothing is left over, nobody's room is taken."""

from __future__ import annotations

import random

import pytest
from scheduler_loop import Loop
from toy_model import generate

from engine.core.wire import BeamParams


@pytest.mark.parametrize("depth", [0, 1])
def test_a_short_prompt_waits_for_no_long_one(depth: int) -> None:
    loop = Loop(depth=depth, budget=32, rows=8, num_blocks=200, max_model_len=300, min_shared_chunk=4)
    for name in "abc":
        loop.add(name, [ord(name) % 7] * 250, 3)
    loop.turn()
    loop.add("short", [5] * 3, 3)
    for _ in range(3 + depth):
        loop.turn()
    assert loop.tokens["short"], "its first token, while the others' prompts are half-way"
    assert not loop.tokens["a"]
    loop.run()
    assert all(plan.num_tokens == 32 for plan in loop.plans[: 700 // 32]), "no step is smaller for it"
    for name in "abc":
        assert loop.tokens[name] == generate([ord(name) % 7] * 250, 253, set())[0]


def test_alone_or_among_the_less_urgent_a_long_prompt_has_all_of_a_step() -> None:
    loop = Loop(budget=32, rows=8, num_blocks=200, max_model_len=300, min_shared_chunk=4, policy="priority")
    loop.add("low", [1] * 64, 1, priority=5)
    loop.turn()
    loop.add("high", [2] * 128, 1, priority=1)
    loop.add("later", [3] * 8, 1, priority=2)
    loop.run()
    lengths = [plan.rows.query_lens.tolist() for plan in loop.plans]
    assert lengths[0] == [32] and lengths[1] == [4, 28], "nearly all of the step for what is more urgent"
    assert lengths[2] == [28, 4], "who is half-way has an eighth"


def test_nothing_is_left_of_a_step_for_who_cannot_start() -> None:
    """A search that waits for rows."""
    loop = Loop(budget=32, rows=4, num_blocks=400, max_model_len=700, min_shared_chunk=4)
    for name in "ab":
        loop.add(name, [1] * 4, 60)
    loop.turn()
    loop.add("long", [2] * 400, 1)
    loop.turn()
    loop.add("search", [3] * 40, 4, followers=["s1"], beams=BeamParams(width=3))
    for _ in range(5):
        loop.turn()
    assert all(plan.num_tokens == 32 for plan in loop.plans[-5:])


def test_a_head_that_fits_again_gets_its_share() -> None:
    loop = Loop(budget=32, rows=8, num_blocks=130, max_model_len=450, min_shared_chunk=4)
    loop.add("first", [1] * 300, 1)
    loop.turn()
    loop.add("long", [2] * 180, 1)
    loop.add("head", [3] * 200, 1)  # not before the first has ended
    loop.run()
    both = [plan for plan in loop.plans if len(plan.rows) == 2 and min(plan.rows.query_lens) > 1]
    assert len(both) > 5, "it does not wait for all of the long one once it fits"


@pytest.mark.parametrize("seed", range(10))
def test_prompts_that_are_half_way_keep_their_room(seed: int) -> None:
    """Nobody who starts beside them takes it, so none of them is preempted while it prefills."""
    rng = random.Random(seed)
    loop = Loop(
        depth=rng.randrange(2), budget=16, rows=8, num_blocks=40, max_model_len=100, min_shared_chunk=rng.choice((1, 4))
    )
    for index in range(30):
        followers = [f"{index}.{i}" for i in range(rng.randrange(3))]
        loop.add(str(index), [rng.randrange(9) for _ in range(rng.randint(1, 90))], 1, followers=followers)
    loop.run()
    assert loop.scheduler.stats().preemptions == 0
    loop.assert_nothing_leaked()
