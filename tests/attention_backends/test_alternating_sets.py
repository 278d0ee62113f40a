"""No copy reads what a later step wrote, however late the device is."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from fake_flashinfer import Stream, StreamEvent
from hypothesis import given
from hypothesis import strategies as st

from attention_backends.alternating_sets import AlternatingSets, Event, ImmediateEvent

# After each step: how many of the queued pieces of work the device gets done.
delays = st.lists(st.integers(0, 6), min_size=1, max_size=30)


def run_steps(progress: list[int], sets: int, copies: int, make_event: Callable[[Stream], Event]) -> tuple[bool, int]:
    """Each step writes its number into the set and queues copies of it. Returns whether every copy took its own step's
    number, and how often the host waited."""
    stream = Stream(late=True)
    alternating = AlternatingSets([[-1] for _ in range(sets)], lambda: make_event(stream))
    landed: list[tuple[int, int]] = []

    def copy(step: int, source: list[int]) -> None:
        landed.append((step, source[0]))

    for step, done in enumerate(progress):
        lease = alternating.begin()
        for _ in range(copies):
            source = lease.set
            source[0] = step
            stream.push(lambda step=step, source=source: copy(step, source))
            lease.seal()  # again behind each: a plan that was made late in the step
        stream.run_until(stream.done + done)
    stream.run_until(len(stream.queued))
    assert len(landed) == copies * len(progress)
    return all(step == value for step, value in landed), stream.waits


@given(delays, st.integers(1, 3), st.integers(1, 3))
def test_every_copy_takes_its_own_steps_data_at_any_delay(progress: list[int], sets: int, copies: int) -> None:
    assert run_steps(progress, sets, copies, StreamEvent)[0]


@given(st.lists(st.integers(1, 2), min_size=1, max_size=30))
def test_two_sets_never_wait_for_a_device_that_is_at_most_one_step_behind(progress: list[int]) -> None:
    """The device finishes, after the host submitted a step, at least everything before that step."""
    stream_lag = [min(1, sum(progress[: i + 1]) - i) for i in range(len(progress))]
    caught_up = [max(lag, 1) if i else 0 for i, lag in enumerate(stream_lag)]
    assert run_steps(caught_up, 2, 1, StreamEvent) == (True, 0)


def test_without_events_and_without_alternation_the_race_is_there() -> None:
    """The proof that the tests above can fail: the same schedule with either half of the cure taken away."""
    never_waits: Callable[[Stream], Event] = lambda _: ImmediateEvent()  # noqa: E731
    assert not run_steps([0, 0], 1, 1, never_waits)[0]
    assert not run_steps([0, 0, 0], 2, 1, never_waits)[0]
    assert run_steps([0, 0], 1, 1, StreamEvent) == (True, 1)  # one set: right, but the host waits every step
    assert run_steps([0, 0], 2, 1, StreamEvent) == (True, 0)


def test_a_step_that_failed_before_its_seal_is_waited_for_too() -> None:
    stream = Stream(late=True)
    alternating = AlternatingSets([[0]], lambda: StreamEvent(stream))
    landed: list[int] = []
    source = alternating.begin().set
    source[0] = 1
    stream.push(lambda: landed.append(source[0]))  # and then the step raises: no seal
    alternating.begin().set[0] = 2
    assert landed == [1]


def test_no_sets_are_refused() -> None:
    with pytest.raises(ValueError, match="at least one"):
        AlternatingSets([], ImmediateEvent)
