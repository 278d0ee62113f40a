"""What is expected of the next answer, by those that have ended."""

from __future__ import annotations

import numpy as np
import pytest

from engine.scheduling.answers import Answers, RunningMean


def _answers(*ended: tuple[str, int, int]) -> Answers:
    answers = Answers()
    for tenant, tokens, most in ended:
        answers.ended(tenant, tokens, most, by_itself=True)
    return answers


def test_ones_long_answers_say_nothing_of_anothers() -> None:
    answers = _answers(*[("honest", 100 + each % 3, 9000) for each in range(200)])
    for each in range(200):
        answers.ended("long", 8000 + each % 3, 9000, by_itself=True)
    assert sum(answers.expected("honest", 9000)) < 120
    assert answers.expected("long", 9000)[0] > 6000
    for index in range(5000):
        answers.ended(f"tenant {index}", 5, 9000, by_itself=True)
    assert len(answers) <= 1024


def test_who_is_new_is_as_others_are() -> None:
    answers = _answers(*[("old", 20, 1000) for _ in range(300)])
    assert answers.expected("new", 1000)[0] == pytest.approx(20, abs=1)
    answers.ended("new", 30, 1000, by_itself=True)
    assert answers.expected("new", 1000)[0] == pytest.approx(20.5, abs=1)


def test_where_answers_are_as_long_as_is_allowed_that_is_what_counts() -> None:
    exact = _answers(*[("a", most, most) for most in (10, 500, 40, 300, 20, 100) * 30])
    for most in (7, 70, 700):
        assert exact.expected("a", most) == pytest.approx((most, 0), rel=0.05, abs=1)
    loose = _answers(*[("a", tokens, 4096) for tokens in (90, 110) * 100])
    mean, more = loose.expected("a", 4096)
    assert mean == pytest.approx(100, rel=0.1) and 5 < more < 60
    assert loose.expected("a", 16) == (16, 0)


def test_the_first_that_end_are_short_and_are_not_taken_for_all() -> None:
    """256 tokens until many have ended, or what is allowed."""
    assert Answers().expected("a", 1000)[0] == 256
    assert Answers().expected("a", 8)[0] == 8
    assert _answers(*[("a", 10, 1000)] * 3).expected("a", 1000)[0] > 200


def test_what_may_be_left_of_one_that_is_longer_than_expected_is_how_far_they_differ() -> None:
    answers = _answers(*[("a", tokens, 4096) for tokens in (50, 150) * 200])
    mean, more = answers.expected("a", 4096)
    most, had = np.full(4, 4096), np.array([0, 100, 500, 4095])
    left = answers.left(["a"] * 4, most, had)
    assert left[:2] == pytest.approx([mean + more, mean + more - 100])
    assert 20 < left[2] < more and left[3] == 1
    assert answers.left([], most[:0], had[:0]).shape == (0,)


def test_of_several_tenants_it_is_by_their_own_answers() -> None:
    answers = _answers(*[("a", 100, 4096)] * 300, *[("b", most, most) for most in (300, 10, 50) * 100])
    most = np.array([4096, 200, 4096])
    left = answers.left(["a", "b", "c"], most, np.zeros(3, dtype=np.int64))
    assert left == pytest.approx([sum(answers.expected(name, m)) for name, m in zip("abc", most.tolist(), strict=True)])


def test_of_one_that_was_broken_off_it_counts_that_it_was_long() -> None:
    answers = _answers(*[("a", 100, 4096)] * 300)
    for tokens, grows in ((10, False), (400, True)):
        before = answers.expected("a", 4096)[0]
        answers.ended("a", tokens, 4096, by_itself=False)
        assert (answers.expected("a", 4096)[0] > before) is grows


def test_one_that_stood_still_says_little_of_others() -> None:
    mean = RunningMean()
    for _ in range(100):
        mean.add(1.0)
    mean.add(3600.0)
    assert mean.mean < 1.3 and mean.mean + mean.deviation < 2.7
