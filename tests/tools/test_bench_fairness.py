"""The simulated loads of `tools/bench_fairness.py`: what must hold on any machine, because the clock is virtual."""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.append(str(Path(__file__).parents[2] / "tools"))
from bench_fairness import CAPACITY, Run, load, quantile


def test_beside_a_flood_others_are_served_nearly_as_if_alone() -> None:
    honest = {f"tenant {index}": CAPACITY / 40 for index in range(9)}
    p99, given = {}, {}
    for policy in ("fcfs", "fair"):
        run = Run(policy, load({**honest, "flood": 100 * CAPACITY / 40}, 25.0, 5))
        run.go()
        theirs = [each for each in run.requests if each.tenant != "flood"]
        assert all(each.end is not None for each in run.requests), "nobody starves"
        p99[policy] = quantile([(each.first or 0.0) - each.at for each in theirs], 0.99)
        given[policy] = sum(run.given.values())
    assert p99["fcfs"] > 10 and p99["fair"] < 0.2
    assert given["fair"] > given["fcfs"], "its prompts do not come in steps that they fill"


def test_at_four_times_the_load_as_much_is_served_in_time_and_who_is_let_in_is_served() -> None:
    goodput = {}
    for factor in (1.0, 4.0):
        run = Run("fcfs", load({"all": factor * CAPACITY}, 100.0, 3, deadline_s=20.0))
        run.go()
        kept = [each for each in run.requests if each.end is not None]
        assert all((each.end or 0.0) <= each.at + 20.5 for each in kept)
        goodput[factor] = sum(each.output for each in kept) / run.now
        admitted = [each for each in run.requests if each.refused is None]
        assert len(kept) > 0.9 * len(admitted)
        assert all(0 < each.refused < 60 for each in run.requests if each.refused is not None)
    assert goodput[4.0] > 0.9 * goodput[1.0]
