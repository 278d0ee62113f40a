"""Times device work: warmed up, repeated, the median of samples that are each long enough for the device's clock."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass

from gpu.device import Device

SAMPLES = 7
SAMPLE_MS = 3.0
"""per sample, so that an event's resolution and its launch are lost in it"""
MAX_CALLS = 256


@dataclass(frozen=True)
class Timing:
    """Of one call."""

    median_us: float
    spread: float
    """(slowest - fastest) / median of the samples: differences below it are noise"""


def time_replays(device: Device, call: Callable[[int], object], copies: int) -> Timing:
    """Time `call(i)`, i cycling through `copies` sets of buffers, by replays of one graph that holds a whole cycle.

    Launch gaps are out of the figure, and where the copies together exceed the L2, its contents are too.
    """

    def cycle() -> None:
        for i in range(copies):
            call(i)

    cycle()
    replay = device.capture(cycle)
    return _time(device, replay, copies)


def time_calls(device: Device, call: Callable[[int], object], copies: int = 1) -> Timing:
    """The same without a graph, for what cannot be captured: gaps between launches count."""

    def cycle() -> None:
        for i in range(copies):
            call(i)

    cycle()
    return _time(device, cycle, copies)


def host_us(device: Device, call: Callable[[], object], count: int = 20) -> float:
    """What one call costs the thread that makes it, with the device idle at its start."""
    samples = []
    for _ in range(3 if device.dry else count):
        device.synchronize()
        start = time.perf_counter()
        call()
        samples.append(1e6 * (time.perf_counter() - start))
    device.synchronize()
    return statistics.median(samples)


def _time(device: Device, run: Callable[[], object], calls_per_run: int) -> Timing:
    device.synchronize()
    start = device.record()
    run()
    once_ms = device.elapsed_ms(start, device.record())
    runs = 1 if device.dry else max(1, min(MAX_CALLS, round(SAMPLE_MS / max(once_ms, 1e-3))))
    samples = []
    for _ in range(2 if device.dry else SAMPLES):
        start = device.record()
        for _ in range(runs):
            run()
        samples.append(device.elapsed_ms(start, device.record()) / runs / calls_per_run)
    median = statistics.median(samples)
    return Timing(1e3 * median, (max(samples) - min(samples)) / median)
