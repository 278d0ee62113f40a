"""What callers of a cluster saw."""

from __future__ import annotations

import itertools
import math
import statistics
from collections.abc import Sequence

import msgspec
import numpy as np

from engine.core.wire import StepOutputs, each_delta
from engine.errors import EngineError
from entrypoints.bench.cluster.layouts import Layout
from entrypoints.bench.cluster.traffic import Arrival


class Outcome(msgspec.Struct, frozen=True, kw_only=True):
    """Latencies in seconds. Where many runs are put together, means, and `spread` says how far they lie apart."""

    replicas: float
    stages: float = 1.0
    """of each replica"""
    prefill: float = 0.0
    """servers that compute prompts for the replicas"""
    requests: float
    seconds: float
    """from the first arrival to the last token"""
    tokens_per_s: float
    """generated"""
    ttft_p50: float
    ttft_p90: float
    tpot_p50: float
    tpot_p90: float
    hits: float
    """of the prompts' tokens, those that a cache had"""
    load_max_over_mean: float
    """of tokens that each replica computed"""
    pace: float | None = None
    """of real replicas: seconds of steps that only decode, over those that the table says"""
    spread: dict[str, float] = {}
    """standard deviations over seeds"""

    def __str__(self) -> str:
        return f"TTFT p90 {self.ttft_p90:.3g} s, TPOT p90 {self.tpot_p90:.3g} s"


class Served(msgspec.Struct, frozen=True):
    """A request, on any clock."""

    arrived_s: float
    first_s: float
    """its first token"""
    ended_s: float
    tokens: int


class Seen:
    """Requests and their tokens as they come, whatever clock it is."""

    def __init__(self, arrivals: Sequence[Arrival]) -> None:
        self._arrived = {each.message.request_id: each.at_s for each in arrivals}
        self._first: dict[str, float] = {}
        self._tokens: dict[str, int] = dict.fromkeys(self._arrived, 0)
        self._ended: dict[str, float] = {}

    @property
    def left(self) -> int:
        return len(self._arrived) - len(self._ended)

    def take_in(self, outputs: StepOutputs, now: float) -> None:
        """Raises EngineError for a request that failed."""
        for delta in each_delta(outputs.deltas):
            name = delta.request_id
            if delta.token_ids:
                self._first.setdefault(name, now)
                self._tokens[name] += len(delta.token_ids)
            if delta.finish_reason == "error":
                raise EngineError(f"request {name} failed: {delta.error}")
            if delta.finish_reason is not None:
                self._ended[name] = now

    def outcome(self, loads: Sequence[int], hits: float) -> Outcome:
        """When nothing is left."""
        served = [
            Served(at, self._first[name], self._ended[name], self._tokens[name]) for name, at in self._arrived.items()
        ]
        return outcome_of(served, loads, hits)


def outcome_of(served: Sequence[Served], loads: Sequence[int], hits: float) -> Outcome:
    """`loads`: of each replica, prefill servers among them."""
    ttft = [each.first_s - each.arrived_s for each in served]
    tpot = [(each.ended_s - each.first_s) / (each.tokens - 1) for each in served if each.tokens > 1]
    seconds = max(each.ended_s for each in served) - min(each.arrived_s for each in served)
    return Outcome(
        replicas=len(loads),
        requests=len(served),
        seconds=seconds,
        tokens_per_s=sum(each.tokens for each in served) / seconds,
        ttft_p50=float(np.percentile(ttft, 50)),
        ttft_p90=float(np.percentile(ttft, 90)),
        tpot_p50=float(np.percentile(tpot, 50)) if tpot else 0.0,
        tpot_p90=float(np.percentile(tpot, 90)) if tpot else 0.0,
        hits=hits,
        load_max_over_mean=max(loads) / max(statistics.mean(loads), 1e-9),
    )


def for_all(outcome: Outcome, layout: Layout) -> Outcome:
    """Of a layout, of which those that were simulated are some, with their share of the traffic."""
    more = layout.servers / outcome.replicas
    return msgspec.structs.replace(
        outcome,
        replicas=layout.replicas,
        stages=layout.stages,
        prefill=layout.prefill,
        requests=outcome.requests * more,
        tokens_per_s=outcome.tokens_per_s * more,
    )


def mean_of(outcomes: Sequence[Outcome]) -> Outcome:
    """Of runs that differ in their seeds."""
    names = [name for name in Outcome.__struct_fields__ if name not in ("spread", "pace")]
    values = {name: [float(getattr(each, name)) for each in outcomes] for name in names}
    spread = {name: round(statistics.stdev(each), 6) for name, each in values.items() if len(each) > 1}
    paces = [each.pace for each in outcomes if each.pace is not None]
    pace = statistics.mean(paces) if paces else None
    return Outcome(**{name: statistics.mean(each) for name, each in values.items()}, pace=pace, spread=spread)


class Ranked(msgspec.Struct, frozen=True):
    """Pairs of layouts, and of how many the simulated and the real ones say alike which has less."""

    alike: int
    pairs: int
    alike_apart: int
    apart: int
    """pairs that differ in reality by more than the deviations of their seeds, so that real runs rank them at all"""

    def __str__(self) -> str:
        return f"{self.alike} of {self.pairs}, {self.alike_apart} of the {self.apart} that real runs tell apart"


def ranked_alike(simulated: Sequence[Outcome], real: Sequence[Outcome], name: str) -> Ranked:
    """Of the same runs, by `name`. With one seed nothing is told apart."""
    alike, apart = [], []
    for first, second in itertools.combinations(range(len(real)), 2):
        ours, theirs = (getattr(each[first], name) - getattr(each[second], name) for each in (simulated, real))
        spreads = [real[each].spread.get(name, math.inf) for each in (first, second)]
        alike.append((ours < 0) == (theirs < 0))
        apart.append(abs(theirs) > math.hypot(*spreads))
    both = sum(same and told for same, told in zip(alike, apart, strict=True))
    return Ranked(sum(alike), len(alike), both, sum(apart))
