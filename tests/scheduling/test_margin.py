"""How much longer than expected those take that run: followed at once, forgotten slowly."""

from __future__ import annotations

import math

import numpy as np
import pytest

from engine.scheduling.margin import Margin

NAN = float("nan")


def _looked(
    now: float, *rows: tuple[float, float, float], margin: Margin | None = None, deadline: float = 10.0
) -> Margin:
    """Rows of seconds: given, expected, taken."""
    margin = Margin(0.0) if margin is None else margin
    margin.look(now, deadline, *np.array(rows, dtype=float).reshape(-1, 3).T)
    return margin


@pytest.mark.parametrize(("takes", "times"), [(5.0, 1.25), (13.0, 1.3), (19.0, 1.9), (1000.0, 2.0)])
def test_what_is_longer_than_expected_counts_at_once(takes: float, times: float) -> None:
    assert _looked(0.0, (12.5, 10.0, takes)).times == pytest.approx(times)


def test_it_comes_down_with_time_while_nobody_is_late_and_not_below_one() -> None:
    margin = _looked(0.0, (12.5, 10.0, 18.0))
    _looked(54.0, (18.0, 10.0, 10.0), margin=margin)
    assert margin.times == pytest.approx(1.0 + 0.8 / math.e)
    for minutes in range(1, 60):
        _looked(60.0 * minutes, (10.0, 10.0, 5.0), margin=margin)
    assert margin.times == pytest.approx(1.0, abs=1e-6) and margin.times >= 1.0


def test_whom_it_keeps_out_it_does_not_keep_out_for_ever() -> None:
    margin = _looked(0.0, (12.5, 10.0, 99.0))
    _looked(30.0, margin=margin, deadline=10.0)
    assert margin.times == pytest.approx(1.25 + 0.75 / math.e), "by the deadline of who comes"
    _looked(3000.0, (NAN, NAN, NAN), margin=margin)
    assert margin.times == pytest.approx(1.25)


def test_those_that_had_time_or_were_promised_nothing_say_nothing() -> None:
    margin = _looked(0.0, (20.0, 10.0, 19.0), (NAN, NAN, NAN), (12.0, NAN, 30.0), (12.0, 0.0, 30.0))
    assert margin.times == 1.25
    assert _looked(0.0, (13.7, 10.0, 15.0)).times == 1.5 and _looked(0.0, (13.8, 10.0, 15.0)).times == 1.25


def test_of_a_hundred_three_may_be_late() -> None:
    fine = [(12.5, 10.0, 12.0)] * 97
    assert _looked(0.0, *fine, *[(12.5, 10.0, 99.0)] * 3).times == 1.25
    assert _looked(0.0, *fine[1:], *[(12.5, 10.0, 99.0)] * 4).times == 2.0


def test_a_clock_that_goes_back_breaks_nothing() -> None:
    margin = _looked(5000.0, (12.5, 10.0, 18.0))
    _looked(0.0, (0.001, 10.0, 5.0), margin=margin)
    assert 1.0 <= margin.times <= 2.0
