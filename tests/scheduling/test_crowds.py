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
    others = rows.query_lens[rows.samples == 0]
    assert 0 < others.sum() <= _BUDGET // 32, "those of the crowd that are half-way go on"


def test_a_step_with_another_ones_prompt_leaves_out_a_crowds_decodes_now_and_then() -> None:
    """Twice in a row at most, and then not before sixteen steps have been; nobody else's are left out, and none is for
    a crowd's own prompts, or for nobody's."""
    loop = _crowded("fair", answers=300)
    for _ in range(90):
        loop.turn()
    assert loop.plans[-1].rows.samples.sum() == 16, "all rows decode"
    decodes = []
    for index in range(20):
        loop.add(f"new {index}", [900 - index] * 20, 1, tenant=Tenant(f"honest {index}"))
        loop.turn()
        rows = loop.plans[-1].rows
        assert 20 in rows.query_lens.tolist(), "it starts at once"
        decodes.append(int((rows.query_lens == 1).sum()))
        while not loop.ends[f"new {index}"]:
            loop.turn()
        loop.turn()
        assert (loop.plans[-1].rows.query_lens == 1).sum() >= 13
    assert decodes[:2] == [1, 1] and decodes[2] >= 13, "the quiet one goes on"
    assert decodes.count(1) == 2 + len(loop.plans[90:]) // 16, decodes
    loop.run()
    loop.assert_nothing_leaked()


def test_with_a_policy_that_is_not_fair_no_decode_is_left_out() -> None:
    loop = _crowded("fcfs", answers=900)
    for _ in range(90):
        loop.turn()
    loop.add("new", [900] * 20, 1, tenant=Tenant("honest"))
    for _ in range(20):
        loop.turn()
        assert (loop.plans[-1].rows.query_lens == 1).sum() >= 15


def test_one_long_prompt_is_no_crowd() -> None:
    loop = _crowded("fair", answers=200, rows=20)
    for _ in range(12):
        loop.turn()
    loop.add("long", [999] * (3 * _BUDGET), 5, tenant=Tenant("honest"))
    loop.turn()
    assert max(loop.plans[-1].rows.query_lens.tolist()) > 0.5 * _BUDGET


def _burst(count: int, rows: int, num_blocks: int = 2000) -> int:
    """Tokens of the first step behind so many requests that come at once, beside one that decodes."""
    loop = Loop(
        policy="fair", rows=rows, num_blocks=num_blocks, budget=_BUDGET, max_model_len=200, depth=0, min_shared_chunk=16
    )
    loop.add("decodes", [1], 60, tenant=Tenant("quiet"))
    for _ in range(40):
        loop.turn()
    for index in range(count):
        loop.add(f"burst {index}", [2 + index] * _PROMPT, 5, tenant=Tenant("burst"))
    loop.turn()
    return int(loop.plans[-1].rows.query_lens.sum())


@pytest.mark.parametrize("count", [2, 8])
def test_a_burst_for_which_there_is_room_is_no_crowd(count: int) -> None:
    assert _burst(count, rows=16) >= 2 * _PROMPT


def test_more_than_there_are_rows_or_blocks_for_is_a_crowd_if_a_step_is_too_small_for_it() -> None:
    held = 1 + _BUDGET // 8
    assert _burst(8, rows=4) == held, "three rows are free"
    assert _burst(8, rows=16, num_blocks=30) == held, "blocks of 4 tokens for four of them"
    assert _burst(2, rows=2) > held, "one row, but a step has room for both"


def test_where_nobody_decodes_the_step_is_full() -> None:
    loop = Loop(policy="fair", rows=4, num_blocks=2000, budget=_BUDGET, max_model_len=200, depth=0)
    for index in range(20):
        loop.add(f"crowd {index}", [2 + index] * 150, 5, tenant=Tenant("crowd"))
    loop.turn()
    loop.turn()
    assert [int(plan.rows.query_lens.sum()) for plan in loop.plans] == [_BUDGET, _BUDGET]
    assert loop.scheduler._crowds._mean == 0, "steps without an answer say nothing of their pace"


@pytest.mark.parametrize("depth", [0, 1])
def test_who_finds_more_in_the_prefix_cache_is_of_the_same_crowd(depth: int) -> None:
    """A half-way prompt has what there is; behind a long head one is found that would start before it."""
    loop = Loop(policy="fair", rows=8, num_blocks=3000, budget=64, max_model_len=1000, depth=depth, min_shared_chunk=16)
    loop.add("warm", [7] * 45, 1, tenant=Tenant("crowd"))
    while not loop.ends["warm"]:
        loop.turn()
    loop.add("decodes", [1], 100, tenant=Tenant("quiet"))
    loop.add("half", [5] * 600, 2, tenant=Tenant("crowd"))
    for _ in range(2):
        loop.turn()
    loop.add("head", [6] * 400, 2, tenant=Tenant("crowd"))
    loop.add("hit", [7] * 45, 2, tenant=Tenant("crowd"))
    while not all(loop.ends[name] for name in ("half", "head", "hit")):
        loop.turn()
        assert (loop.plans[-1].rows.query_lens > 0).all()


def test_a_more_urgent_request_of_a_crowds_tenant_is_none() -> None:
    loop = _crowded("fair", answers=200, rows=20)
    for _ in range(3):
        loop.turn()
    loop.add("urgent", [999] * 50, 5, tenant=Tenant("crowd"), priority=-1)
    loop.turn()
    assert 50 in loop.plans[-1].rows.query_lens.tolist()


def test_a_less_urgent_prompt_that_is_half_way_does_not_keep_the_crowd_behind_it() -> None:
    loop = Loop(
        policy="fair", rows=4, num_blocks=9000, budget=_BUDGET, max_model_len=4000, depth=0, min_shared_chunk=16
    )
    loop.add("decodes", [1], 3000, tenant=Tenant("quiet"))
    loop.turn()
    loop.add("low", [5] * 1000, 5, tenant=Tenant("crowd"), priority=1)
    loop.turn()
    for index in range(60):
        loop.add(f"urgent {index}", [2 + index] * _PROMPT, 2, tenant=Tenant("crowd"))
    while not loop.tokens["low"]:
        loop.turn()
    assert sum(bool(loop.ends[f"urgent {index}"]) for index in range(60)) == 60


@pytest.mark.parametrize("budget", [2, 4, 16])
def test_the_pace_grows_in_small_steps_too(budget: int) -> None:
    loop = Loop(policy="fair", rows=4, num_blocks=2000, budget=budget, max_model_len=4000, depth=0, min_shared_chunk=1)
    loop.add("decodes", [1], 3000, tenant=Tenant("quiet"))
    loop.turn()
    for index in range(20):
        loop.add(f"crowd {index}", [2 + index] * _PROMPT, 2, tenant=Tenant("crowd"))
    while not all(loop.ends[f"crowd {index}"] for index in range(20)):
        loop.turn()
    needed = 20 * (_PROMPT + 2) / (budget - 1)
    assert len(loop.plans) < 2 * needed + 20 * 4


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
