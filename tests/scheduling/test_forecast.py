"""When what runs and comes will have ended, beside a server that is played step by step."""

from __future__ import annotations

import random
from dataclasses import replace

import numpy as np
import pytest

from engine.scheduling.forecast import Forecast, Job, Prices

PRICES = Prices(0.03, 0.002, 0.0005)
OFTEN = 1e6
TYPICAL = Job(40, 100)


def _forecast(running: int, rows: int = 64, arrivals: float = OFTEN, waiting: int = 0, prompt: int = 0) -> Forecast:
    return Forecast(
        PRICES, TYPICAL, arrivals, running, rows, prompt, waiting, waiting_prompt_tokens=TYPICAL.prompt_tokens
    )


def _played(
    left: list[int], new: Job, rows: int, arrivals: float = OFTEN, waiting: int = 0, short: float = TYPICAL.steps
) -> float:
    """When the new one has ended: rows are taken in order, prompts are computed as their rows are taken, every step has
    a part for each row, and those that come are typical ones, one after the other; those that wait need `short`
    steps."""
    others = [float(steps) for steps in left]
    now = new.prompt_tokens * PRICES.prompt_token_s
    came, to_go, width = 0.0, new.steps, new.rows
    line = waiting if len(others) + width > rows else 0
    starts = False
    while to_go:
        starts = starts or (not line and len(others) + width <= rows)
        while line and len(others) < rows:  # they begin before it
            line -= 1
            others.append(short)
            now += TYPICAL.prompt_tokens * PRICES.prompt_token_s
        while starts and len(others) < min(len(left), rows - width) and came < now * arrivals:
            came += 1
            others.append(TYPICAL.steps)
            now += TYPICAL.prompt_tokens * PRICES.prompt_token_s
        now += PRICES.step_s + PRICES.row_s * (len(others) + (width if starts else 0))
        others = [steps - 1 for steps in others if steps > 1]
        to_go -= starts
    return now


def _anywhere(dice: random.Random, number: int) -> list[int]:
    """Of so many typical ones, what is left."""
    return [dice.randint(1, int(TYPICAL.steps)) for _ in range(number)]


@pytest.mark.parametrize("seed", range(20))
def test_whoever_ends_is_followed_by_another(seed: int) -> None:
    dice = random.Random(seed)
    running = dice.randint(0, 20)
    new = Job(dice.randint(60, 200), dice.randint(1, 500))
    played = _played(_anywhere(dice, running), new, 64)
    assert _forecast(running).seconds(new) == pytest.approx(played, rel=0.08)


def test_if_nobody_comes_what_runs_long_is_all_there_is() -> None:
    new = Job(50, 200, rows=3)
    played = _played([60] * 5, new, 64, arrivals=0.0)
    assert _forecast(5, arrivals=0.0).seconds(new) == pytest.approx(played)


@pytest.mark.parametrize("arrivals", [0.5, 1.0, 2.0])
def test_if_few_come_it_is_no_shorter_than_it_turns_out_and_shorter_than_if_many_did(arrivals: float) -> None:
    dice = random.Random(1)
    new, running = Job(120, 200), 10
    forecast = _forecast(running, arrivals=arrivals).seconds(new)
    assert _played(_anywhere(dice, running), new, 64, arrivals) < forecast
    assert _forecast(running, arrivals=0.0).seconds(new) < forecast <= _forecast(running).seconds(new)


@pytest.mark.parametrize("waiting", [0, 4, 40])
def test_where_all_rows_are_taken_it_waits_until_those_before_it_have_begun(waiting: int) -> None:
    dice, rows, new = random.Random(2), 10, Job(60, 100)
    left = [1 + int(each * TYPICAL.steps / rows) for each in range(rows)]
    dice.shuffle(left)
    played = _played(left, new, rows, waiting=waiting)
    assert _forecast(rows, rows, waiting=waiting).seconds(new) == pytest.approx(played, rel=0.15)


@pytest.mark.parametrize("short", [1, 10, 30])
def test_short_answers_that_wait_bring_their_prompts_all_the_same(short: int) -> None:
    dice, rows, new = random.Random(3), 10, Job(60, 100)
    left = [1 + int(each * TYPICAL.steps / rows) for each in range(rows)]
    dice.shuffle(left)
    played = _played(left, new, rows, waiting=100, short=short)
    forecast = replace(_forecast(rows, rows, waiting=100), waiting_steps=float(short))
    assert forecast.seconds(new) == pytest.approx(played, rel=0.15)


def test_who_waits_for_little_holds_nobody_up() -> None:
    typical, short = _forecast(10, 10, waiting=40), replace(_forecast(10, 10, waiting=40), waiting_steps=1.0)
    job = Job(5, 0)
    assert replace(typical, waiting_steps=2.0 * TYPICAL.steps).seconds(job) == typical.seconds(job)
    spared = 40 * (TYPICAL.steps - 1) / 10 * (PRICES.step_s + 10 * PRICES.row_s)
    assert typical.seconds(job) - short.seconds(job) == pytest.approx(spared)


def test_those_that_run_end_as_late_as_that_makes_them() -> None:
    forecast, new, steps = _forecast(5, arrivals=0.0, prompt=30), Job(50, 200), np.array([10.0, 60.0])
    own = PRICES.step_s + 5 * PRICES.row_s
    assert forecast.running_s(steps) == pytest.approx(steps * own + 30 * PRICES.prompt_token_s)
    later = np.array([10.0, 50.0]) * PRICES.row_s + 200 * PRICES.prompt_token_s
    assert forecast.delays_s(steps, new) == pytest.approx(later)


def test_of_others_prompts_no_more_is_known_to_be_in_its_way_than_fits_into_its_steps() -> None:
    forecast, steps = replace(_forecast(5, waiting=3, arrivals=0.0, prompt=1500), step_tokens=64), np.array([2.0, 60.0])
    prompts = np.array([128, 1500]) * PRICES.prompt_token_s
    assert forecast.known_s(steps) == pytest.approx(steps * forecast.step_s(5) + prompts)
    assert (forecast.running_s(steps) > forecast.known_s(steps)).all()


def test_prompts_of_those_that_follow_take_no_more_of_a_step_than_it_has_room_for() -> None:
    often = replace(_forecast(10), typical=Job(1.0, 1500))
    bare = PRICES.step_s + 10 * PRICES.row_s
    assert often.step_s(10) == pytest.approx(bare + 10 * 1500 * PRICES.prompt_token_s)
    assert replace(often, step_tokens=64).step_s(10) == pytest.approx(bare + 64 * PRICES.prompt_token_s)


def test_who_waits_in_line_delays_nobody_that_runs() -> None:
    forecast, steps = _forecast(5, rows=5, waiting=2), np.array([10.0, 60.0])
    assert not forecast.delays_s(steps, Job(50, 200)).any()
    few = replace(forecast, waiting=0)
    assert few.seconds(Job(50, 200)) < forecast.seconds(Job(50, 200))


def test_where_nothing_runs_it_is_the_request_alone() -> None:
    forecast = _forecast(0, arrivals=0.0)
    assert forecast.seconds(Job(10, 100)) == pytest.approx(10 * 0.032 + 0.05)
    assert len(forecast.running_s(np.zeros(0))) == 0
