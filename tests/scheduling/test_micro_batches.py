"""Who decodes in which step, where stages compute several at once."""

from __future__ import annotations

import itertools

import numpy as np
from hypothesis import given
from hypothesis import strategies as st
from scheduler_loop import Loop

from engine.scheduling.micro_batches import in_turn, most_prompt_tokens

COSTS = st.lists(st.tuples(st.integers(0, 4), st.integers(1, 100)), min_size=1, max_size=40)


@given(rows=COSTS, in_flight=st.integers(0, 5000), stages=st.integers(2, 6))
def test_a_step_gets_its_share_to_the_nearest_row_and_who_waited_longest_comes_first(
    rows: list[tuple[int, int]], in_flight: int, stages: int
) -> None:
    turns, costs = (np.array(column) for column in zip(*rows, strict=True))
    chosen = in_turn(turns, costs, in_flight, stages)
    assert chosen.any()
    share = (in_flight + costs.sum()) / stages
    taken = costs[chosen].sum()
    assert chosen.sum() == 1 or taken <= share + costs[chosen].max() / 2
    if not chosen.all():
        assert turns[chosen].max() <= turns[~chosen].min()
        left = np.flatnonzero(~chosen)
        following = left[np.argmin(turns[left])]
        assert taken + costs[following] / 2 > share


@given(costs=st.lists(st.integers(1, 100), min_size=2, max_size=40), stages=st.integers(2, 6))
def test_as_many_steps_as_there_are_stages_have_all(costs: list[int], stages: int) -> None:
    left, total = np.array(costs), sum(costs)
    for _ in range(stages):
        if len(left):
            left = left[~in_turn(np.zeros(len(left)), left, total - int(left.sum()), stages)]
    assert left.sum() <= stages * max(costs) / 2, "but for what rounding leaves over"


def test_rows_that_decode_are_divided_and_stay_so() -> None:
    loop = Loop(stages=(2, 1000), depth=1, rows=8, num_blocks=200, max_model_len=64)
    for row in range(8):
        loop.add(str(row), [row], 40)
    loop.run()
    steady = [set(plan.rows.row.tolist()) for plan in loop.plans[6:60]]
    assert {len(rows) for rows in steady} == {4}
    for one, other in itertools.pairwise(steady):
        assert one.isdisjoint(other)


def test_a_long_context_weighs_more() -> None:
    loop = Loop(stages=(2, 4), depth=1, rows=8, num_blocks=200, max_model_len=160, budget=160)
    loop.add("long", [7] * 100, 20)
    for row in range(4):
        loop.add(str(row), [row], 20)
    loop.run()
    row = loop.plans[0].added[0].row
    decodes = [plan.rows.row.tolist() for plan in loop.plans if (plan.rows.samples > 0).all()]
    alone = [rows for rows in decodes[4:20] if row in rows]
    assert alone and all(rows == [row] for rows in alone)


def test_parts_of_one_prompt_are_in_several_steps_at_once() -> None:
    loop = Loop(stages=(2, 8), depth=1, num_blocks=100, max_model_len=64, budget=64, min_shared_chunk=4)
    loop.add("a", list(range(10)) * 4, 2)
    loop.turn()
    loop.turn()
    assert [plan.rows.num_tokens for plan in loop.plans] == [5, 5]
    loop.run()
    loop.assert_nothing_leaked()


def test_prompts_fill_all_stages_but_in_no_smaller_parts_than_pay() -> None:
    assert most_prompt_tokens(1024, 2, 128) == 128
    assert most_prompt_tokens(4000, 2, 128) == 500
    assert most_prompt_tokens(100, 4, 128) == 128
