"""Normalised latency over request rate, and the rate that a system sustains."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from entrypoints.bench.paper.figure import Scale
from entrypoints.bench.paper.simulate import Simulation
from entrypoints.bench.paper.static_batches import run_static
from entrypoints.bench.paper.systems import STATIC, Setup
from entrypoints.bench.paper.traces import Workload

HOUR_BOUND_S = 1.0
_STEP = 1.15
_SMALLEST = 0.02
"""of the guess: below it the search gives up"""


@dataclass(frozen=True)
class Point:
    rate: float
    latency_s: float
    """mean normalised latency; at least this, where the run was given up"""


@dataclass(frozen=True)
class Curve:
    points: list[Point]
    """by rate"""
    sustained: float
    """highest rate found whose latency is within the bound; 0 if there is none"""


def search(latency: Callable[[float], float], guess: float, tolerance: float, bound: float) -> Curve:
    """Bracket the rate at which `latency` crosses `bound`, beginning at `guess`, then bisect until the bracket is
    narrower than `tolerance` (relative). The curve holds every rate that was looked at, and some lower ones."""
    seen: dict[float, float] = {}

    def holds(rate: float) -> bool:
        seen[rate] = latency(rate)
        return seen[rate] <= bound

    low = high = guess
    if holds(guess):
        while holds(high := high * _STEP):
            low = high
    else:
        while not holds(low := low / _STEP):
            high = low
            if low < guess * _SMALLEST:
                return _curve(seen, 0.0)
    while high / low > 1 + tolerance:
        middle = (low * high) ** 0.5
        low, high = (middle, high) if holds(middle) else (low, middle)
    holds(low / 2)
    return _curve(seen, low)


def _curve(seen: dict[float, float], sustained: float) -> Curve:
    return Curve([Point(rate, seen[rate]) for rate in sorted(seen)], sustained)


def curve(setup: Setup, workload: Workload, seconds: float, scale: Scale, seed: int) -> Curve:
    """Simulated, with traces of so many seconds, and given up when certain to be far above the bound. Static batches
    cost nothing to simulate, so they have the paper's own measure: an hour, and 1 s/token."""
    guess = setup.guess(workload, seed)
    if setup.system == STATIC:

        def hour(rate: float) -> float:
            return run_static(setup, workload.jobs(rate, 3600, seed)).normalised_latency_s

        return search(hour, guess, scale.tolerance, bound=HOUR_BOUND_S)

    def latency(rate: float) -> float:
        jobs = workload.jobs(rate, seconds, seed)
        return Simulation(setup, workload, jobs, scale.give_up_s).run().normalised_latency_s

    return search(latency, guess, scale.tolerance, scale.bound_s)
