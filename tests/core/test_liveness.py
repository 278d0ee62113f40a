"""Slow, idle or hung: the verdict from heartbeats alone."""

from __future__ import annotations

from engine.core.liveness import Liveness
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
