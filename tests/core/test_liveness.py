"""Slow, idle or hung: the verdict from heartbeats alone."""

from __future__ import annotations

import pytest

from engine.core.liveness import SETTLED_STEPS, Liveness
from engine.core.step_times import StepTimes
from engine.core.wire import Heartbeat, Phase


def beat(turns: int, phase: Phase, received: int = 1) -> Heartbeat:
    return Heartbeat(turns=turns, phase=phase, received=received)


def started() -> Liveness:
    live = Liveness(10.0, now=0.0)
    live.progressed(1.0)
    live.beat(beat(0, "idle", 0), 2.0)
    return live


def test_a_start_may_take_for_ever_while_it_beats_and_only_then():
    live = Liveness(10.0, now=0.0)
    for second in range(1, 1000):
        live.beat(beat(0, "start", 0), float(second))
        assert live.verdict(float(second)) is None
    assert "no heartbeat" in (live.verdict(1010.0) or "")


def test_an_idle_core_owes_nothing():
    assert started().verdict(1e9) is None


def test_a_message_makes_an_idle_core_owe_a_sign_of_life_from_now_on():
    live = started()
    live.sent(1000.0)
    assert live.verdict(1009.0) is None
    assert "no heartbeat" in (live.verdict(1011.0) or "")


def test_beats_without_turns_are_a_hang_and_say_where():
    live = started()
    live.sent(100.0)
    for second in range(101, 112):
        live.beat(beat(5 if second < 103 else 6, "collect"), float(second))
    assert live.verdict(112.0) is None
    assert "waiting for the device" in (live.verdict(114.0) or "")


def test_turns_or_outputs_keep_a_busy_core_alive():
    live = started()
    live.sent(100.0)
    for second in range(101, 200):
        live.beat(beat(second, "collect"), float(second))
        assert live.verdict(float(second)) is None
    for second in range(200, 300):
        live.progressed(float(second))
        assert live.verdict(float(second)) is None


def test_idle_is_not_believed_while_a_message_is_under_way():
    live = started()
    live.sent(100.0)
    live.beat(beat(0, "idle", received=0), 100.1)
    assert live.verdict(111.0) is not None
    live.beat(beat(3, "idle", received=1), 112.0)
    assert live.idle


def test_a_start_beat_that_overtakes_ready_does_not_lift_the_limit():
    live = Liveness(10.0, now=0.0)
    live.progressed(1.0)
    live.beat(beat(0, "start", 0), 1.1)
    live.beat(beat(0, "plan", 0), 9.0)
    assert "no turn" in (live.verdict(12.0) or "")


def settled(step_s: float, *, steps: int = SETTLED_STEPS) -> Liveness:
    """At work since second 100, with steps of that length behind it."""
    live = started()
    live.sent(100.0)
    live.beat(Heartbeat(turns=steps, phase="collect", received=1, steps=steps, step_s=step_s), 100.0)
    return live


def test_silence_with_work_at_hand_is_a_stall_long_before_it_is_a_death():
    live = Liveness(300.0, now=0.0)
    live.progressed(1.0)
    live.beat(beat(0, "idle", 0), 2.0)
    assert live.stalled(1e6) is None, "an idle core owes nothing"
    live.sent(1000.0)
    assert live.stalled(1009.0) is None
    assert "no heartbeat" in (live.stalled(1011.0) or "") and live.verdict(1011.0) is None
    live.progressed(1020.0)
    assert live.stalled(1021.0) is None


@pytest.mark.parametrize(("step_s", "limit"), [(0.02, 10.0), (0.5, 10.0), (2.0, 40.0)])
def test_a_loop_that_beats_and_does_not_turn_is_a_stall_after_twenty_of_its_slow_steps(step_s, limit):
    live = settled(step_s)
    for second in range(1, int(limit) + 5):
        live.beat(Heartbeat(turns=64, phase="collect", received=1, steps=64, step_s=step_s), 100.0 + second)
        assert (live.stalled(100.0 + second) is not None) == (second > limit)


def test_the_first_steps_compilation_and_the_start_may_take_longer():
    few = settled(0.02, steps=SETTLED_STEPS - 1)
    known = settled(0.02)
    for live in (few, known):
        live.beat(Heartbeat(turns=live._turns, phase="collect", received=1, steps=live._steps, step_s=0.02), 115.0)
    assert few.stalled(115.0) is None
    few.beat(Heartbeat(turns=few._turns, phase="collect", received=1, steps=few._steps, step_s=0.02), 160.0)
    assert few.stalled(160.0) is None and "no turn" in (few.stalled(160.5) or ""), "but not for ever"
    assert known.stalled(115.0, compiling=True) is None and known.stalled(115.0) is not None
    start = Liveness(300.0, now=0.0)
    assert start.stalled(299.0) is None


def test_step_times_keep_the_latest_and_tell_their_slow_ones():
    times = StepTimes()
    assert times.slowest() == 0.0
    for _ in range(99):
        times.add(0.01)
    times.add(5.0)
    assert times.slowest() == 0.01, "one in a hundred does not count"
    for _ in range(600):
        times.add(1.0)
    assert (times.slowest(), times.count) == (1.0, 700)
    for _ in range(600):
        times.add(0.02)
    assert times.slowest() == 0.02
