"""Buckets, and a histogram that takes many equal values at once.

Buckets hold all of vLLM's, so that what is asked of its histograms finds its limits here, and finer ones where a CPU or
a small model has its values.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterable
from itertools import accumulate, count

from prometheus_client.core import HistogramMetricFamily, Metric
from prometheus_client.registry import Collector
from prometheus_client.utils import floatToGoString

FIRST_TOKEN_S = (
    *(0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1, 2.5, 5, 7.5),
    *(10, 20, 40, 80, 160, 640, 2560),
)
PER_TOKEN_S = (
    *(0.001, 0.002, 0.005, 0.01, 0.015, 0.02, 0.025, 0.03, 0.04, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75),
    *(1, 2.5, 5, 7.5, 10, 20, 40, 80),
)
LATENCY_S = (0.1, 0.3, 0.5, 0.8, 1, 1.5, 2, 2.5, 5, 10, 15, 20, 30, 40, 50, 60, 120, 240, 480, 960, 1920, 7680)
PHASE_S = (0.001, 0.005, 0.01, 0.025, 0.05, *LATENCY_S)
"""of queueing and prefill, which may be over at once"""
STEP_TOKENS = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096, 8192, 16384)
SAMPLES = (1, 2, 5, 10, 20)


def up_to(most: int) -> tuple[int, ...]:
    """1, 2, 5, 10, 20, ... up to `most`, which is at least 1."""
    buckets: list[int] = []
    for power in count():
        for digit in (1, 2, 5):
            if (value := digit * 10**power) > most:
                return tuple(buckets)
            buckets.append(value)
    raise AssertionError("powers do not end")


class WeightedHistogram(Collector):
    """Prometheus' histogram, whose `observe` costs the same for one value and for a thousand equal ones."""

    def __init__(self, name: str, meaning: str, labels: dict[str, str], buckets: tuple[float, ...]) -> None:
        self._name, self._meaning, self._labels = name, meaning, labels
        self._bounds = buckets
        self._counts = [0] * (len(buckets) + 1)
        self._sum = 0.0

    def observe(self, value: float, times: int = 1) -> None:
        self._counts[bisect_left(self._bounds, value)] += times
        self._sum += value * times

    def collect(self) -> Iterable[Metric]:
        limits = [*map(floatToGoString, self._bounds), "+Inf"]
        family = HistogramMetricFamily(self._name, self._meaning, labels=list(self._labels))
        cumulative = list(zip(limits, map(float, accumulate(self._counts)), strict=True))
        family.add_metric(list(self._labels.values()), cumulative, self._sum)
        yield family
