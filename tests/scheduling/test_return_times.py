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
    assert len(times._ends) <= 1024
    assert times.take(4999, 0.0, 0.0, 1.0) == 1.0
