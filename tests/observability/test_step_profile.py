"""The recorder under a clock that the test moves: the parts of a step add up to its time, whatever was marked."""

from __future__ import annotations

import sys
import threading
from collections.abc import Sequence
from itertools import pairwise
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from engine.observability.step_profile import (
    ATTENTION,
    ATTENTION_PLAN,
    HAND_OVER,
    INPUTS,
    LOGITS,
    MODEL,
    PLAN,
    RESULTS,
    SAMPLING,
    WAIT,
    PartTime,
    PartTimes,
    Recorder,
)
from engine.step import Rows, ScheduledRow, StepPlan

PARTS = (ATTENTION_PLAN, MODEL, ATTENTION, LOGITS, SAMPLING, RESULTS)


class Clock:
    def __init__(self) -> None:
        self.ns = 1_000

    def __call__(self) -> int:
        return self.ns


class LateDevice:
    """A device whose clock runs at its own pace and is read only afterwards."""

    def __init__(self, clock: Clock) -> None:
        self.clock = clock
        self.reads = 0

    def stamp(self) -> object:
        return self.clock.ns

    def read(self, stamps: Sequence[object]) -> list[int]:
        self.reads += 1
        at = [stamp for stamp in stamps if isinstance(stamp, int)]
        return [3 * (ns - at[0]) for ns in at]


def plan(step_id: int = 0) -> StepPlan:
    return StepPlan(step_id=step_id, rows=Rows.of([ScheduledRow(row=0, computed=4, query_len=1, samples=True)]))


def recorder(**options: Any) -> tuple[Recorder, Clock]:
    clock = Clock()
    made = Recorder(now=clock, **options)
    made.active = True
    return made, clock


@given(st.lists(st.tuples(st.integers(0, 9), st.lists(st.tuples(st.sampled_from(PARTS), st.integers(0, 10**6))))))
def test_parts_of_every_step_add_up_to_its_wall_time(steps: list[tuple[int, list[tuple[str, int]]]]) -> None:
    profile, clock = recorder()
    spent: list[dict[str, int]] = []
    for between, marks in steps:
        spent.append({INPUTS: between})
        profile.step(plan())
        clock.ns += between
        for part, ns in marks:
            profile.mark(part)
            clock.ns += ns
            spent[-1][part] = spent[-1].get(part, 0) + ns
        profile.mark(HAND_OVER)
        clock.ns += 7
    found = profile.take().steps()
    assert len(found) == len(steps)
    for index, (step, expected) in enumerate(zip(found, spent)):
        last = index == len(steps) - 1
        assert step.is_last == last
        assert sum(part.ns for part in step.parts.values()) == step.wall_ns
        assert {part: time.ns for part, time in step.parts.items()} == expected | ({} if last else {HAND_OVER: 7})
    for step, after in pairwise(found):
        assert step.end_ns == after.start_ns  # no time lies between two steps


def test_an_undisturbed_step_keeps_its_ends_only_and_runs_the_plain_program() -> None:
    profile, clock = recorder()
    profile.alternate = 2
    kinds = []
    for _ in range(8):
        kinds.append(profile.step(plan()))
        clock.ns += 5
        profile.mark(SAMPLING)
        clock.ns += 5
        profile.mark(HAND_OVER)
        clock.ns += 1
    assert kinds == [False, False, True, True] * 2
    steps = profile.take().steps()
    assert [step.watched for step in steps] == kinds
    assert [step.wall_ns for step in steps] == [11] * 7 + [10]
    assert steps[0].parts == {HAND_OVER: PartTime(1, 1)}
    assert steps[2].parts == {INPUTS: PartTime(5, 1), SAMPLING: PartTime(5, 1), HAND_OVER: PartTime(1, 1)}
    own = steps[2].to_its_own_end()
    assert (own.wall_ns, own.parts) == (10, {INPUTS: PartTime(5, 1), SAMPLING: PartTime(5, 1)})


def test_pieces_and_calls_are_told_apart_and_counted() -> None:
    profile, clock = recorder()
    first_calls: list[tuple[str, list[Any]]] = []
    profile.on_first_call = lambda part, arguments: first_calls.append((part, list(arguments)))

    def spend(ns: int) -> Any:
        def work(*arguments: Any) -> str:
            clock.ns += ns
            return f"{ns}"

        return work

    eager = profile.wrap_call(spend(3))
    profile.step(plan())
    profile.mark(MODEL)
    assert eager(1, 2) == "3"
    clock.ns += 50  # the model goes on
    profile.mark(LOGITS)
    assert {part: time.ns for part, time in profile.take().steps()[0].parts.items()} == {
        INPUTS: 0,
        MODEL: 50,
        ATTENTION: 3,
    }
    piece, other, attention = profile.wrap_piece(spend(10)), profile.wrap_piece(spend(20)), profile.wrap_call(spend(2))
    profile.step(plan())
    for _ in range(3):
        assert piece([4, "weights"]) == "10"
        attention(1)
    other([4])
    profile.mark(HAND_OVER)
    (step,) = profile.take().steps()
    named = [part for part, _ in first_calls]
    assert first_calls == [(named[0], [4, "weights"]), (named[1], [4])] and len(set(named)) == 2
    assert step.parts == {
        INPUTS: PartTime(0, 1),
        named[0]: PartTime(30, 3),
        ATTENTION: PartTime(6, 3),
        named[1]: PartTime(20, 1),
    }


def test_other_threads_are_beside_the_step_and_cut_to_its_window() -> None:
    profile, clock = recorder()

    def core() -> None:
        profile.mark(PLAN)
        clock.ns += 10
        profile.mark(WAIT)

    thread = threading.Thread(target=core)
    thread.start()
    thread.join()
    start = clock.ns
    profile.step(plan())
    clock.ns += 100
    profile.mark(HAND_OVER)
    timeline = profile.take()
    assert timeline.beside(start - 4, start + 60) == {PLAN: 4, WAIT: 60}
    (step,) = timeline.steps()
    assert step.parts == {INPUTS: PartTime(100, 1)}


def test_parts_follow_the_device_and_the_wall_the_host() -> None:
    clock = Clock()
    device = LateDevice(clock)
    profile = Recorder(now=clock, device=device)
    profile.active = True
    profile.step(plan())
    clock.ns += 10
    profile.mark(MODEL)
    clock.ns += 20
    profile.mark(HAND_OVER)
    assert device.reads == 0  # looking does not wait
    (step,) = profile.take().steps()
    assert step.wall_ns == 30 and device.reads == 1
    assert step.parts == {INPUTS: PartTime(30, 1), MODEL: PartTime(60, 1)}


def test_an_idle_recorder_keeps_nothing_and_asks_for_nothing() -> None:
    profile = Recorder()
    assert not profile.step(plan())
    profile.mark(MODEL)
    assert profile.take().steps() == []


def test_parts_add_up_to_the_time_between_their_marks() -> None:
    clock = iter([1.0, 1.5, 3.5, 4.0, 4.25])
    times = PartTimes(now=lambda: next(clock))
    assert not times.step(plan())  # the step's program is the runner's own
    assert times.wrap_call(len) is len and times.wrap_piece(list) is list
    for part in (MODEL, LOGITS, INPUTS, MODEL):
        times.mark(part)
    assert times.seconds() == {INPUTS: 0.75, MODEL: 2.0, LOGITS: 0.5}


@pytest.mark.parametrize(("active", "calls"), [(True, 7), (False, 2)])
def test_a_mark_costs_a_few_calls_and_nothing_when_nobody_looks(active: bool, calls: int) -> None:
    profile = Recorder()
    profile.active = active
    profile.step(plan())
    seen: list[str] = []
    sys.setprofile(lambda frame, event, function: seen.append(event))
    profile.mark(MODEL)
    sys.setprofile(None)  # the last call that is seen
    assert sum(event in ("call", "c_call") for event in seen) <= calls, seen
