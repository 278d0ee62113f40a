"""The policy `fair`: prompts of who sends faster than it is served are spread over steps that decode, nobody else's."""

from __future__ import annotations

import pytest
from scheduler_loop import Loop

from engine.request import Tenant

_BUDGET, _PROMPT = 64, 30


def _crowded(policy: str, answers: int, rows: int = 16) -> Loop:
    """A hundred requests of one tenant, and who decodes beside them."""
    loop = Loop(
        policy=policy, rows=rows, num_blocks=2000, budget=_BUDGET, max_model_len=1000, depth=0, min_shared_chunk=16
    )
    loop.add("decodes", [1], 900, tenant=Tenant("quiet"))
    loop.turn()
    for index in range(100):
        loop.add(f"crowd {index}", [2 + index] * _PROMPT, answers, tenant=Tenant("crowd"))
    return loop


def _prompt_tokens(loop: Loop) -> list[int]:
    """Of each step behind the first."""
    rows = [plan.rows for plan in loop.plans[1:]]
    return [int(each.query_lens[each.query_lens > 1].sum()) for each in rows]


def test_a_step_that_decodes_is_not_filled_with_a_crowds_prompts() -> None:
    taken = {}
    for policy in ("fcfs", "fair"):
        loop = _crowded(policy, answers=200)
        for _ in range(10):
            loop.turn()
        taken[policy] = _prompt_tokens(loop)[:5]
    assert max(taken["fcfs"]) > 0.8 * _BUDGET
    assert max(taken["fair"]) <= _BUDGET // 8 + 1, "nothing was seen yet: an eighth"


def test_its_pace_grows_until_answers_are_what_it_waits_for() -> None:
    """Answers of two tokens: full rows need thirty tokens of prompts for two that decode: nearly all of each step."""
    loop = _crowded("fair", answers=2)
    for _ in range(110):
        loop.turn()
    taken = _prompt_tokens(loop)
    assert max(taken[:5]) < 0.25 * _BUDGET
    assert sum(taken[-10:]) > 8 * _BUDGET


def test_who_is_no_crowd_has_the_step() -> None:
    loop = _crowded("fair", answers=200)
    for _ in range(12):  # it was given what who comes back is
        loop.turn()
    loop.add("new", [999] * 50, 5, tenant=Tenant("honest"))
    loop.turn()
    rows = loop.plans[-1].rows
    assert 50 in rows.query_lens.tolist(), "all of it, at once"
    others = rows.query_lens[(rows.query_lens > 1) & (rows.query_lens != 50)]
    assert 0 < others.sum() <= _BUDGET // 32, "those of the crowd that are half-way go on"


def test_one_long_prompt_is_no_crowd() -> None:
    loop = _crowded("fair", answers=200, rows=20)
    for _ in range(12):
        loop.turn()
    loop.add("long", [999] * (3 * _BUDGET), 5, tenant=Tenant("honest"))
    loop.turn()
    assert max(loop.plans[-1].rows.query_lens.tolist()) > 0.5 * _BUDGET


@pytest.mark.parametrize("policy", ["fcfs", "fair"])
def test_all_of_a_crowd_is_served(policy: str) -> None:
    loop = _crowded(policy, answers=3)
    while not all(loop.ends.get(f"crowd {index}") for index in range(100)):
        loop.turn()


def test_no_step_more_for_the_last_few_tokens_of_a_prompt() -> None:
    """Two wait: the first would leave half of the step, and have three tokens left for the next one."""
    loop = Loop(policy="fcfs", rows=4, num_blocks=200, budget=64, max_model_len=200, depth=0, min_shared_chunk=32)
    loop.add("a", [1] * 35, 3)
    loop.add("b", [2] * 60, 3)
    loop.turn()
    assert loop.plans[-1].rows.query_lens.tolist() == [35, 29]
