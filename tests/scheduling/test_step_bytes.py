"""Plans and results travel as bytes and arrive equal."""

from __future__ import annotations

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from engine.step import (
    NewRow,
    RowLogprobs,
    RowParams,
    Rows,
    ScheduledRow,
    StepPlan,
    StepResult,
    TokenLogprobs,
    Write,
    Writes,
    decode_plan,
    decode_result,
    encode_step,
)

numbers = st.integers(0, 2**31 - 1)
pairs = st.lists(st.tuples(numbers, numbers), max_size=3)
words = st.lists(numbers, min_size=1, max_size=4)
scheduled = st.lists(
    st.builds(ScheduledRow, numbers, numbers, numbers, st.integers(0, 9), st.integers(0, 9)), max_size=5
)
written = st.lists(st.builds(Write, numbers, numbers, numbers, words), max_size=4)
params = st.builds(
    RowParams,
    seed=st.integers(-(2**63), 2**63 - 1),
    logit_bias=st.dictionaries(numbers, st.floats(-100, 100), max_size=3),
    bad_words=st.lists(words, max_size=3),
    logprobs=st.none() | st.integers(0, 20),
)
new_rows = st.lists(st.builds(NewRow, row=numbers, token_ids=words, prompt_len=numbers, params=params), max_size=3)
plans = st.builds(
    StepPlan,
    step_id=st.integers(),
    rows=scheduled.map(Rows.of),
    released=st.lists(numbers, max_size=3),
    added=new_rows,
    rewrites=written.map(Writes.of),
    block_appends=written.map(Writes.of),
    block_copies=pairs,
    swap_out=pairs,
    swap_in=pairs,
)


def entry(size: int) -> st.SearchStrategy[TokenLogprobs]:
    values = st.lists(st.floats(-1e30, 0), min_size=size, max_size=size)
    ids = st.lists(numbers, min_size=size, max_size=size)
    return st.builds(TokenLogprobs, token_ids=ids, logprobs=values, rank=numbers)


entries = st.integers(1, 4).flatmap(entry)
results = st.builds(
    StepResult,
    step_id=st.integers(0, 2**31),
    token_ids=words,
    logprobs=st.dictionaries(numbers, entries, max_size=3).map(RowLogprobs.of),
    prompt_logprobs=st.dictionaries(numbers, st.lists(entries, max_size=3), max_size=2),
    faults=words,
    reasons=st.dictionaries(numbers, st.text(max_size=5), max_size=2),
)


@given(plans.filter(lambda plan: -(2**63) <= plan.step_id < 2**63))
def test_a_plan_arrives_as_it_was_sent(plan: StepPlan) -> None:
    arrived = decode_plan(encode_step(plan))
    assert arrived == plan
    assert arrived.rows.each() == plan.rows.each() and arrived.rewrites.each() == plan.rewrites.each()


@given(results)
def test_a_result_arrives_as_it_was_sent(result: StepResult) -> None:
    arrived = decode_result(encode_step(result))
    assert arrived == result and arrived.logprobs.by_row() == result.logprobs.by_row()


def test_what_differs_is_not_equal() -> None:
    one = StepPlan(step_id=1, rows=Rows.of([ScheduledRow(0, 1, 1, True)]))
    assert one != StepPlan(step_id=1, rows=Rows.of([ScheduledRow(0, 2, 1, True)]))
    assert one != StepPlan(step_id=1) and one.rows != Writes.of([])


def test_what_is_no_plan_is_refused() -> None:
    encoded = encode_step(StepPlan(step_id=1, rows=Rows.of([ScheduledRow(0, 1, 1, True)])))
    for damaged in (encoded[:-3], b"", encoded.replace(b"\x01", b"\x00", 1)[:20]):
        with pytest.raises((msgspec.DecodeError, ValueError)):
            decode_plan(damaged)


def test_a_step_of_256_decodes_is_small() -> None:
    rows = Rows.of(ScheduledRow(row, 1000 + row, 1, True) for row in range(256))
    appends = Writes.of(Write(0, row, 63, [row]) for row in range(0, 256, 16))
    assert len(encode_step(StepPlan(step_id=1, rows=rows, block_appends=appends))) <= 8192
