"""What callers of a cluster saw."""

from __future__ import annotations

import statistics
from collections.abc import Sequence

import msgspec
import numpy as np

from engine.core.wire import StepOutputs, each_delta
from engine.errors import EngineError
from entrypoints.bench.cluster.traffic import Arrival


class Outcome(msgspec.Struct, frozen=True, kw_only=True):
    """Latencies in seconds. Where many runs are put together, means, and `spread` says how far they lie apart."""

    replicas: float
    stages: float = 1.0
    """of each replica"""
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
    spread: dict[str, float] = {}
    """standard deviations over seeds"""


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

    def outcome(self, replicas: int, loads: Sequence[int], hits: float) -> Outcome:
        """When nothing is left. `loads`: of each replica."""
        ttft = [self._first[name] - at for name, at in self._arrived.items()]
        several = {name: tokens for name, tokens in self._tokens.items() if tokens > 1}
        tpot = [(self._ended[name] - self._first[name]) / (tokens - 1) for name, tokens in several.items()]
        seconds = max(self._ended.values()) - min(self._arrived.values())
        return Outcome(
            replicas=replicas,
            requests=len(self._arrived),
            seconds=seconds,
            tokens_per_s=sum(self._tokens.values()) / seconds,
            ttft_p50=float(np.percentile(ttft, 50)),
            ttft_p90=float(np.percentile(ttft, 90)),
            tpot_p50=float(np.percentile(tpot, 50)) if tpot else 0.0,
            tpot_p90=float(np.percentile(tpot, 90)) if tpot else 0.0,
            hits=hits,
            load_max_over_mean=max(loads) / max(statistics.mean(loads), 1e-9),
        )


def for_all(outcome: Outcome, replicas: int, stages: int) -> Outcome:
    """Of so many replicas, of which those that were simulated are some, with their share of the traffic."""
    more = replicas / outcome.replicas
    return msgspec.structs.replace(
        outcome,
        replicas=replicas,
        stages=stages,
        requests=outcome.requests * more,
        tokens_per_s=outcome.tokens_per_s * more,
    )


def mean_of(outcomes: Sequence[Outcome]) -> Outcome:
    """Of runs that differ in their seeds."""
    names = [name for name in Outcome.__struct_fields__ if name != "spread"]
    values = {name: [float(getattr(each, name)) for each in outcomes] for name in names}
    spread = {name: round(statistics.stdev(each), 6) for name, each in values.items() if len(each) > 1}
    return Outcome(**{name: statistics.mean(each) for name, each in values.items()}, spread=spread)
