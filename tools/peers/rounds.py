"""The engines take turns, so that a drift of the machine touches all alike. Whoever has no turn is paused."""

from __future__ import annotations

import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import psutil

from entrypoints.bench.metrics import Figures
from entrypoints.bench.workloads import WARM_UP_REPEAT
from peers.catalogue import START, Engine, Mode
from peers.noise import Watch, wait_until_quiet
from peers.process import EngineFailedError, Running

MAX_FAILURES = 2
"""after which an engine is left out of the rest of the run"""


@dataclass(frozen=True)
class Limits:
    start_s: float = 900.0
    measure_s: float = 600.0
    quiet_cores: float = 0.15
    """others may use this much before a measurement begins..."""
    quiet_wait_s: float = 15.0
    """...else it begins after this long"""
    budget_s: float = float("inf")
    """no measurement begins later than this"""


@dataclass
class Measurement:
    workload: str
    engine: str
    repeat: int
    figures: Figures
    outside_cores: float
    steal_cores: float


@dataclass
class Failure:
    engine: str
    doing: str
    reason: str


@dataclass
class Member:
    """An engine in one mode, over the whole run; the process behind it may come and go."""

    engine: Engine
    mode: Mode
    running: Running | None = None
    warm: set[str] = field(default_factory=set)
    """what it was warmed up for since its start"""
    startups_s: list[float] = field(default_factory=list)
    peak_bytes: int = 0
    versions: dict[str, str] = field(default_factory=dict)
    facts: dict[str, Any] = field(default_factory=dict)
    failures: int = 0
    last_used: float = 0.0

    @property
    def name(self) -> str:
        return self.engine.name

    @property
    def given_up(self) -> bool:
        return self.failures >= MAX_FAILURES


class Rounds:
    def __init__(self, engines: Sequence[Engine], limits: Limits) -> None:
        self.limits = limits
        self.members = [Member(engine, mode) for engine in engines for mode in _modes(engine)]
        self.measurements: list[Measurement] = []
        self.failures: list[Failure] = []
        self._began = time.perf_counter()

    def run(self, workloads: Sequence[str], repeats: int) -> None:
        """Every workload `repeats` times, each time by every engine that takes it. Always ends all processes."""
        try:
            for workload in workloads:
                for repeat in range(repeats):
                    for member in self.members:
                        if _takes(member, workload):
                            self._turn(member, workload, repeat)
        finally:
            for member in self.members:
                self._end(member)

    def _turn(self, member: Member, workload: str, repeat: int) -> None:
        if member.given_up or self._spent(member, workload):
            return
        try:
            if workload == START:
                figures, watch = self._start_anew(member, repeat)
            else:
                figures, watch = self._measure(member, workload, repeat)
        except EngineFailedError as error:
            member.failures += 1
            self.failures.append(Failure(member.name, f"{workload} #{repeat}", str(error)))
            _say(f"{workload} #{repeat} {member.name}: FAILED: {error}")
            self._end(member)
            return
        load = watch.load
        self.measurements.append(
            Measurement(workload, member.name, repeat, figures, round(load.outside, 3), round(load.steal, 3))
        )
        _say(f"{workload} #{repeat} {member.name}: {_brief(figures)}; others used {load.outside:.2f} cores")
        self._rest(member)

    def _measure(self, member: Member, workload: str, repeat: int) -> tuple[Figures, Watch]:
        running = self._awake(member)
        for warm_up in {workload} & {"W1", "W5"} - member.warm:
            running.measure(warm_up, WARM_UP_REPEAT, self.limits.measure_s)
            member.warm.add(warm_up)
        wait_until_quiet(self.limits.quiet_cores, self.limits.quiet_wait_s)
        # While it was paused the kernel marked its pages as idle, or took them: everyone touches its own first.
        running.measure("WARM", WARM_UP_REPEAT, self.limits.measure_s)
        with Watch() as watch:
            figures = running.measure(workload, repeat, self.limits.measure_s)
        if figures.get("failed") or figures.get("short"):
            raise EngineFailedError(f"{figures.get('failed')} requests failed, {figures.get('short')} ended early")
        if member.engine.floor:
            figures = {name: value for name, value in figures.items() if name == "tpot_mean_ms"}
        return figures, watch

    def _start_anew(self, member: Member, repeat: int) -> tuple[Figures, Watch]:
        if member.running is not None:
            self._end(member)
        wait_until_quiet(self.limits.quiet_cores, self.limits.quiet_wait_s)
        with Watch() as watch:
            self._awake(member)
        return {"startup_s": member.startups_s[-1]}, watch

    def _awake(self, member: Member) -> Running:
        """Its process, running; started where there is none, after making room for it."""
        if member.running is None:
            self._make_room(member.engine.needs_bytes)
            _say(f"starting {member.name} ({member.mode})")
            member.running = member.engine.start(member.mode, self.limits.start_s)
            member.startups_s.append(member.running.startup_s)
            member.versions, member.facts = member.running.versions, member.running.facts
        else:
            member.running.resume()
        member.last_used = time.perf_counter()
        return member.running

    def _rest(self, member: Member) -> None:
        if member.running is not None:
            member.running.pause()
            member.peak_bytes = max(member.peak_bytes, member.running.peak_memory_bytes())

    def _make_room(self, needs_bytes: int) -> None:
        """Ends those unused for longest until there is enough memory; they are started again at their next turn."""
        for idle in sorted((m for m in self.members if m.running is not None), key=lambda m: m.last_used):
            if psutil.virtual_memory().available >= needs_bytes:
                return
            _say(f"ending {idle.name} to make room")
            self._end(idle)

    def _end(self, member: Member) -> None:
        if member.running is None:
            return
        running, member.running = member.running, None
        member.peak_bytes = max(member.peak_bytes, running.peak_memory_bytes())
        member.warm.clear()
        running.stop()

    def _spent(self, member: Member, workload: str) -> bool:
        if time.perf_counter() - self._began < self.limits.budget_s:
            return False
        failure = Failure(member.name, workload, "not measured: the run's time was spent")
        if failure not in self.failures:
            self.failures.append(failure)
        return True


def _modes(engine: Engine) -> list[Mode]:
    modes: list[Mode] = []
    if any(name != "W6" for name in engine.workloads):
        modes.append("offline")
    if "W6" in engine.workloads:
        modes.append("http")
    return modes


def _takes(member: Member, workload: str) -> bool:
    return workload in member.engine.workloads and (workload == "W6") == (member.mode == "http")


def _brief(figures: Figures) -> str:
    names = ("startup_s", "wall_s", "output_tokens_per_s", "ttft_mean_ms", "tpot_mean_ms")
    return ", ".join(f"{name} {figures[name]:.4g}" for name in names if name in figures)


def _say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)
