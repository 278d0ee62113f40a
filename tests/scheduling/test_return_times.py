"""What those are told that are refused."""

from __future__ import annotations

from itertools import pairwise

from engine.scheduling.return_times import ReturnTimes


def test_one_stands_behind_the_other() -> None:
    times = ReturnTimes()
    assert [times.take("a", 10.0, 0.5, 2.0) for _ in range(3)] == [0.5, 2.5, 4.5]
    assert times.take("b", 10.0, 0.5, 2.0) == 0.5  # another line
    assert times.take("a", 15.0, 0.5, 2.0) == 1.5
    assert times.take("a", 30.0, 0.5, 2.0) == 0.5


def test_one_that_has_to_wait_for_long_holds_nobody_up() -> None:
    times = ReturnTimes()
    assert times.take("a", 0.0, 500.0, 1.0) == 500.0
    assert times.take("a", 0.0, 0.5, 1.0) == 1.5


def test_a_line_is_no_longer_than_clients_wait_and_who_is_beyond_comes_at_other_times() -> None:
    times = ReturnTimes()
    told = [times.take("a", 0.0, 0.0, 1.0) for _ in range(1000)]
    assert told[:61] == [float(i) for i in range(61)]
    beyond = sorted(told[61:])
    assert beyond[0] >= 30.0 and beyond[-1] <= 60.0
    assert max(after - before for before, after in pairwise(beyond)) < 0.1
    assert times.take("a", 61.0, 0.0, 1.0) == 0.0  # nothing of it stays


def test_few_lines_are_remembered() -> None:
    times = ReturnTimes()
    for line in range(5000):
        times.take(line, 0.0, 0.0, 1.0)
    assert len(times._lines) <= 1024
    assert times.take(4999, 0.0, 0.0, 1.0) == 1.0


def test_who_was_told_and_does_not_come_stands_in_nobodys_way() -> None:
    times = ReturnTimes()
    for _ in range(60):  # a burst, of which nobody comes again
        times.take("a", 0.0, 0.0, 1.0)
    times.came("a", 5.0)
    assert times.take("a", 5.0, 0.5, 1.0) > 40.0, "three have not come, nor is it known of many of those behind them"
    times.came("a", 25.0)
    assert times.take("a", 25.0, 0.5, 1.0) < 12.0
    times.came("a", 55.0)
    assert times.take("a", 55.0, 0.5, 1.0) < 2.0


def test_those_who_come_when_they_were_told_to_keep_the_line() -> None:
    times, told = ReturnTimes(), list[float]()
    for _ in range(30):
        told.append(times.take("a", 0.0, 1.0, 1.0))
    for at in told[:20]:
        times.came("a", at + 0.5)
    assert times.take("a", 20.5, 1.0, 1.0) == 10.5
    assert times.take("a", 20.5, 1.0, 1.0) == 11.5


def test_one_line_knows_nothing_of_another_ones_clients() -> None:
    times = ReturnTimes()
    for _ in range(60):
        times.take("a", 0.0, 0.0, 1.0)
    times.came("a", 100.0)
    assert [times.take("b", 100.0, 0.0, 1.0) for _ in range(4)] == [0.0, 1.0, 2.0, 3.0]


def test_as_many_are_waited_for_as_may_be() -> None:
    times = ReturnTimes()
    for _ in range(20_000):
        times.take("a", 0.0, 0.0, 0.001)
    assert len(times._lines["a"].due) <= 256
