"""Order, chunks, sharing, bounds and isolation, one property each."""

from __future__ import annotations

import pytest
from scheduler_loop import Loop
from toy_model import POISON, generate

from engine.errors import EngineError, InvalidRequestError, QueueFullError
from engine.step import StepPlan, StepResult


def added(plan: StepPlan) -> list[int]:
    """First prompt token of each row that the plan starts: the tests give every request its own."""
    return [new.token_ids[0] for new in plan.added]


def test_long_prompt_is_computed_in_chunks_of_the_budget() -> None:
    loop = Loop(budget=8)
    loop.add("a", list(range(10)) * 2, 2)
    loop.run()
    assert [(row.computed, row.query_len, row.samples) for plan in loop.plans for row in plan.rows.each()] == [
        (0, 8, False),
        (8, 8, False),
        (16, 4, True),
        (20, 1, True),
    ]
    assert loop.plans[0].rows.each()[0].row == loop.plans[0].added[0].row
    assert [len(append.values) for plan in loop.plans for append in plan.block_appends.each()] == [2, 2, 1, 1]


def test_long_prefill_does_not_starve_decodes() -> None:
    loop = Loop(budget=8, rows=4)
    loop.add("decoding", [1], 20)
    loop.turn()
    loop.add("long", [2] * 50, 1)
    for _ in range(7):
        loop.turn()
    for plan in loop.plans[1:]:
        decode, chunk = plan.rows.each()
        assert (decode.query_len, decode.samples, chunk.query_len) == (1, True, 7)


def test_prompts_take_less_of_a_step_in_which_others_decode() -> None:
    loop = Loop(budget=32, rows=4, mixed=5)
    loop.add("alone", [3] * 20, 30)
    loop.turn()
    for name, length in (("half-way", 7), ("next", 2), ("last", 12)):
        loop.add(name, [length] * length, 1)
    loop.run()
    lengths = [[row.query_len for row in plan.rows.each()] for plan in loop.plans]
    assert lengths[0] == [20]  # nobody waits for it
    mixed = [plan[1:] for plan in lengths[1:] if len(plan) > 1]
    assert mixed == [[5], [2, 2, 1], [5], [5], [1]]  # "alone" decodes in each of them
    assert all(plan[0] == 1 for plan in lengths[1:])


def test_high_priority_prefill_does_not_starve_decodes() -> None:
    loop = Loop(budget=8, rows=4, policy="priority")
    loop.add("decoding", [1], 20, priority=5)
    loop.turn()
    loop.add("long", [2] * 50, 1, priority=-5)
    loop.run()
    assert [row.query_len for plan in loop.plans[1:8] for row in plan.rows.each()] == [1, 7] * 7


def test_fcfs_starts_in_order_of_arrival_and_ignores_priority() -> None:
    loop = Loop(rows=1)
    for i in range(5):
        loop.add(str(i), [i], 2, priority=-i)
    loop.run()
    assert [token for plan in loop.plans for token in added(plan)] == [0, 1, 2, 3, 4]


def test_a_large_request_at_the_head_is_not_overtaken() -> None:
    loop = Loop(num_blocks=16, block_size=4, rows=4)
    loop.add("first", [0] * 30, 20)
    loop.turn()
    loop.add("large", [1] * 50, 2)
    loop.add("small", [2], 2)
    loop.run()
    assert [token for plan in loop.plans for token in added(plan)] == [0, 1, 2]


def test_priority_starts_lower_values_first_then_earlier_arrivals() -> None:
    loop = Loop(rows=1, policy="priority")
    for name, priority in enumerate([1, 0, -1, 0, 1]):
        loop.add(str(name), [name], 2, priority=priority)
    loop.run()
    assert [token for plan in loop.plans for token in added(plan)] == [2, 1, 3, 0, 4]


def test_the_latest_arrival_is_preempted_first_and_resumes_before_later_ones() -> None:
    loop = Loop(num_blocks=8, block_size=4, rows=3, caching=False, max_model_len=33)
    for i in range(4):
        loop.add(str(i), [i] * 6, 14)
    loop.run()
    starts = [token for plan in loop.plans for token in added(plan)]
    assert loop.scheduler.stats().preemptions > 0
    assert list(dict.fromkeys(starts)) == [0, 1, 2, 3]
    assert starts.count(0) == 1, "the earliest is never preempted"
    finishes = list(loop.ends)
    assert finishes == ["0", "1", "2", "3"]


def test_the_lowest_priority_is_preempted_first() -> None:
    loop = Loop(num_blocks=8, block_size=4, rows=2, caching=False, max_model_len=33, policy="priority")
    loop.add("unimportant", [0] * 8, 20, priority=1)
    loop.turn()
    loop.add("important", [1] * 8, 20, priority=0)
    loop.run()
    starts = [token for plan in loop.plans for token in added(plan)]
    assert starts == [0, 1, 0], "though it came first and runs first"
    assert loop.tokens["unimportant"] == generate([0] * 8, 28, set())[0]


def test_a_preempted_decode_gives_its_share_of_the_step_back() -> None:
    loop = Loop(num_blocks=9, block_size=4, rows=2, budget=5, caching=False, max_model_len=36, policy="priority")
    loop.add("low", [0] * 4, 20, priority=1)
    loop.turn()
    loop.add("high", [1] * 28, 8, priority=0)
    loop.run()
    preempting = next(plan for plan in loop.plans if plan.released)
    assert [row.query_len for row in preempting.rows.each()] == [4], "only the prefill, for which the decode had to go"
    assert loop.tokens["low"] == generate([0] * 4, 24, set())[0]
    assert loop.tokens["high"] == generate([1] * 28, 36, set())[0]


@pytest.mark.parametrize("depth", [0, 1])
def test_nothing_is_admitted_in_a_step_that_preempted(depth: int) -> None:
    loop = Loop(depth=depth, num_blocks=9, block_size=4, rows=3, max_model_len=33, caching=False, policy="priority")
    loop.add("middle", [0] * 4, 28, priority=1)
    loop.add("low", [1] * 14, 10, priority=2)
    while loop.kv.pool.num_free:
        loop.turn()
    loop.add("high", [2] * 4, 2, priority=0)
    while not loop.scheduler.stats().preemptions:
        loop.turn()
    assert loop.plans[-1].released and not loop.plans[-1].added
    loop.turn()
    assert added(loop.plans[-1])[0] == 2, "there was room for it all along"
    loop.run()


@pytest.mark.parametrize("depth", [0, 1])
def test_repeated_prompt_computes_at_most_one_block_again(depth: int) -> None:
    loop = Loop(depth=depth, num_blocks=400, block_size=16, budget=512, max_model_len=2100)
    prompt = [(i * i) % 11 for i in range(2000)]
    loop.add("first", prompt, 1)
    loop.run()
    computed = loop.executor.computed_tokens
    loop.add("again", prompt, 1)
    loop.run()
    assert loop.executor.computed_tokens - computed <= 16
    assert (loop.cached("first"), loop.cached("again")) == (0, 1984)
    assert loop.tokens["again"] == loop.tokens["first"]
    stats = loop.scheduler.stats()
    assert (stats.prefix_query_tokens, stats.prefix_hit_tokens, stats.prompt_tokens) == (4000, 1984, 4000)


def test_requests_of_one_step_share_the_blocks_that_it_fills() -> None:
    loop = Loop(budget=64)
    prompt = [1, 2, 3, 4, 5, 6, 7, 8, 9]
    for name in "abc":
        loop.add(name, prompt, 6)
    loop.turn()
    assert [row.query_len for row in loop.plans[0].rows.each()] == [1, 1, 9]
    loop.run()
    for name in "abc":
        assert loop.tokens[name] == generate(prompt, 15, set())[0]
    assert [loop.cached(name) for name in "abc"] == [0, 8, 8]


def test_the_next_turn_of_a_conversation_reuses_the_answer() -> None:
    loop = Loop(block_size=4)
    loop.add("first", [1, 2, 3], 10)
    loop.run()
    conversation = [1, 2, 3, *loop.tokens["first"], 4]
    loop.add("second", conversation, 2)
    loop.run()
    assert loop.cached("second") == 12, "12 of 13 tokens had KV; the answer's last token never had"


def test_other_salt_shares_nothing() -> None:
    loop = Loop()
    prompt = [1, 2, 3, 4, 5, 6, 7, 8, 9]
    for name, salt in [("a", None), ("b", "x"), ("c", ""), ("d", "x")]:
        loop.add(name, prompt, 1, salt=salt)
    loop.run()
    assert [loop.cached(name) for name in "abcd"] == [0, 0, 0, 8]


def test_reset_forgets_what_nobody_uses() -> None:
    loop = Loop()
    prompt = [1, 2, 3, 4, 5, 6, 7, 8, 9]
    loop.add("a", prompt, 1)
    loop.run()
    assert loop.scheduler.reset_prefix_cache() == 2
    loop.add("b", prompt, 1)
    loop.run()
    assert loop.cached("b") == 0


def test_queue_is_bounded_and_the_refused_request_leaves_no_trace() -> None:
    loop = Loop(rows=1, max_waiting=2)
    loop.add("a", [1])
    loop.turn()
    loop.add("b", [2])
    loop.add("c", [3])
    with pytest.raises(QueueFullError, match="--max-waiting 2"):
        loop.add("d", [4])
    loop.abort(["b"])
    loop.add("d", [4])
    loop.run()
    loop.assert_nothing_leaked()
    assert set(loop.ends) >= {"a", "b", "c", "d"}


@pytest.mark.parametrize(
    ("prompt", "max_tokens", "field"),
    [
        ([], 4, "prompt"),
        ([1] * 64, 4, "prompt"),
        ([1] * 40, 4, "prompt"),
        ([1] * 30, 20, "max_tokens"),
        ([1], 0, "max_tokens"),
    ],
)
def test_what_can_never_fit_is_refused_with_the_field_at_fault(prompt: list[int], max_tokens: int, field: str) -> None:
    loop = Loop(num_blocks=8, block_size=4, max_model_len=64)
    with pytest.raises(InvalidRequestError) as caught:
        loop.add("a", prompt, max_tokens)
    assert caught.value.field == field
    assert not loop.scheduler.has_work


def test_a_request_that_fills_the_pool_to_the_last_slot_is_served() -> None:
    loop = Loop(num_blocks=8, block_size=4, max_model_len=64)
    loop.add("a", [1] * 30, 3)
    loop.run()
    assert len(loop.tokens["a"]) == 3


def test_an_id_in_use_is_refused_and_free_again_after_the_end() -> None:
    loop = Loop()
    loop.add("a", [1], 2)
    with pytest.raises(InvalidRequestError, match="in use"):
        loop.add("a", [2], 2)
    loop.run()
    loop.scheduler.add(loop.requests["a"])


@pytest.mark.parametrize("depth", [0, 1])
def test_a_faulted_row_ends_alone_and_its_prefix_is_not_reused(depth: int) -> None:
    loop = Loop(depth=depth, rows=4)
    bad = [1, 2, 3, POISON, 5, 6, 7, 8, 9]
    loop.add("good", [1, 2, 3, 4, 5], 10)
    loop.add("bad", bad, 10)
    loop.run()
    (end,) = loop.ends["bad"]
    assert (end.finish_reason, end.error_kind, end.token_ids) == ("error", "fault", [])
    assert end.error is not None and "NaN" in end.error
    assert loop.tokens["good"] == generate([1, 2, 3, 4, 5], 15, set())[0]
    loop.add("again", bad, 10)
    loop.run()
    assert loop.cached("again") == 0
    loop.assert_nothing_leaked()


@pytest.mark.parametrize("turns", range(6))
def test_abort_frees_all_blocks_at_once_in_every_state(turns: int) -> None:
    loop = Loop(rows=2, num_blocks=16, budget=4)
    for i in range(5):
        loop.add(str(i), [i] * 9, 10)
    for _ in range(turns):
        loop.turn()
    loop.abort([str(i) for i in range(5)])
    assert loop.scheduler.stats().kv_blocks_used == 0
    assert [loop.reason(str(i)) for i in range(5)] == ["abort"] * 5
    loop.run()
    loop.assert_nothing_leaked()


def test_rows_and_blocks_of_a_sequence_certain_to_end_serve_the_next_step() -> None:
    loop = Loop(depth=1, rows=1)
    loop.add("a", [1], 3)
    loop.add("b", [2], 1)
    loop.run()
    assert len(loop.plans) == 4, "b starts in the step after a's last one, before a's last token has arrived"
    assert loop.plans[3].released == [0] and added(loop.plans[3]) == [2]


def test_a_sequence_certain_to_end_is_not_planned_again() -> None:
    loop = Loop(depth=1)
    loop.add("a", [1, 2, 3], 5)
    loop.run()
    assert len(loop.plans) == 5


def test_min_tokens_defers_stop_tokens() -> None:
    free = generate([5], 40, set())[0]
    stop = free[0]
    loop = Loop()
    loop.add("now", [5], 30, stop=[stop])
    loop.add("later", [5], 30, stop=[stop], min_tokens=3)
    loop.run()
    assert (loop.tokens["now"], loop.reason("now")) == ([stop], "stop")
    assert (loop.tokens["later"], loop.reason("later")) == generate([5], 31, {stop}, 3)
    assert len(loop.tokens["later"]) > 3


def test_decode_step_carries_nothing_that_the_device_holds() -> None:
    loop = Loop(block_size=4, rows=4)
    for i in range(4):
        loop.add(str(i), [i], 30)
    loop.run()
    for plan in loop.plans[1:]:
        assert not plan.added
        assert sum(len(append.values) for append in plan.block_appends.each()) in (0, 4)


def test_aborted_requests_do_not_pile_up_in_the_queue() -> None:
    loop = Loop(rows=1, max_waiting=100)
    loop.add("running", [1], 60)
    loop.turn()
    for i in range(2000):
        loop.add(str(i), [2])
        loop.abort([str(i)])
    assert len(loop.scheduler._waiting._heap) < 50


def test_a_result_out_of_order_or_of_the_wrong_size_is_refused() -> None:
    loop = Loop()
    loop.add("a", [1], 5)
    plan = loop.scheduler.plan()
    assert plan is not None
    with pytest.raises(EngineError, match="expected that of step 0"):
        loop.scheduler.complete(StepResult(step_id=7, token_ids=[1]))
    with pytest.raises(EngineError, match="1 tokens"):
        loop.scheduler.complete(StepResult(step_id=0, token_ids=[]))


def test_prompt_logprobs_survive_a_preemption_without_gap_or_repeat() -> None:
    loop = Loop(num_blocks=9, block_size=4, rows=2, budget=6, max_model_len=33)
    loop.add("old", [1] * 4, 28)
    loop.add("scored", list(range(11)) * 2, 9, prompt_logprobs=0)
    while loop.scheduler.stats().preemptions == 0 and loop.scheduler.has_work:
        loop.turn()
    loop.run()
    assert loop.scheduler.stats().preemptions > 0
    entries = loop.prompt_logprobs["scored"]
    assert [-int(entry.logprobs[0]) for entry in entries] == list(range(1, 22))
    assert loop.tokens["scored"] == generate(list(range(11)) * 2, 31, set())[0]
