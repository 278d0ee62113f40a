"""A cluster on a virtual clock: the engine's own router, takeover, loop, scheduler and KV cache; only steps are not
computed, and take what a table says."""

from __future__ import annotations

import functools
from collections import deque
from collections.abc import Sequence
from typing import Protocol

import msgspec

from engine.config import EngineConfig
from engine.core.wire import AddRequest, CoreStats, StepOutputs
from engine.errors import CoreDiedError, EngineError
from engine.replicas.fleet import Fleet
from engine.replicas.replica import Replica
from engine.replicas.router import Router
from entrypoints.bench.cluster.clock import Clock
from entrypoints.bench.cluster.costs import StepCosts
from entrypoints.bench.cluster.neighbours import Neighbours
from entrypoints.bench.cluster.outcome import Outcome, Seen
from entrypoints.bench.cluster.stages import Stages
from entrypoints.bench.cluster.traffic import Arrival
from entrypoints.bench.cluster.virtual_core import VirtualCore


class Front(Protocol):
    """Who sends requests to cores, and listens to these."""

    told: deque[StepOutputs]
    """what callers are to be told"""

    def send(self, message: AddRequest) -> None: ...

    def lose(self) -> None:
        """A core is gone, the first one that may."""
        ...

    def loads_and_hits(self) -> tuple[list[int], float]:
        """Tokens that each core computed, and the share of prompts' tokens that caches had."""
        ...


class Cluster:
    """One run."""

    def __init__(self, clock: Clock, front: Front) -> None:
        self._clock, self._front = clock, front

    def run(self, arrivals: Sequence[Arrival], lose_at_s: float | None = None) -> Outcome:
        """`lose_at_s`: when a core is lost. Raises EngineError for requests that cannot end."""
        seen = Seen(arrivals)
        for arrival in arrivals:
            self._clock.at(arrival.at_s, functools.partial(self._front.send, arrival.message))
        if lose_at_s is not None:
            self._clock.at(lose_at_s, self._front.lose)
        self._clock.run(functools.partial(self._take_in, seen))
        if seen.left:
            raise EngineError(f"{seen.left} requests can never end: they do not fit")
        return seen.outcome(*self._front.loads_and_hits())

    def _take_in(self, seen: Seen) -> None:
        while self._front.told:
            seen.take_in(self._front.told.popleft(), self._clock.now)


class Replicated:
    """Replicas behind the engine's own router, each of whose stages has a machine of its own, unless they are
    neighbours."""

    def __init__(
        self,
        config: EngineConfig,
        costs: StepCosts,
        count: int,
        router: Router,
        stages: Stages,
        clock: Clock,
        neighbours: Neighbours | None,
    ) -> None:
        alone = msgspec.structs.replace(config, parallel=msgspec.structs.replace(config.parallel, data=1))
        self._fleet: Fleet[VirtualCore] = Fleet(router)
        self.told = self._fleet.told
        self._cores = [VirtualCore(alone, costs, stages, clock, None, neighbours) for _ in range(count)]
        for number, core in enumerate(self._cores):
            replica = Replica(number, number, core, core.ready)
            core.hears = functools.partial(self._take_in, replica)
            self._fleet.add(replica)

    def send(self, message: AddRequest) -> None:
        self._fleet.send(message)

    def lose(self) -> None:
        replica = self._fleet.replicas[0]
        replica.client.lost = True
        self.told.append(self._fleet.lost(replica, CoreDiedError("lost, as it was to be")))

    def loads_and_hits(self) -> tuple[list[int], float]:
        return loads_and_hits([core.stats for core in self._cores])

    def _take_in(self, replica: Replica[VirtualCore], outputs: StepOutputs) -> None:
        self.told.append(self._fleet.take_in(replica, outputs))


def replicated(
    config: EngineConfig,
    costs: StepCosts,
    count: int,
    router: Router,
    stages: Stages | None = None,
    neighbours: Neighbours | None = None,
) -> Cluster:
    """`stages`: as many as `config` has; None: one. `neighbours`: of one machine; None: each has one of its own."""
    clock = Clock()
    return Cluster(clock, Replicated(config, costs, count, router, stages or Stages(), clock, neighbours))


def loads_and_hits(stats: Sequence[CoreStats]) -> tuple[list[int], float]:
    """Of cores that do all of their requests."""
    loads = [each.prompt_tokens - each.prefix_hit_tokens + each.generated_tokens for each in stats]
    prompts = sum(each.prompt_tokens for each in stats)
    return loads, sum(each.prefix_hit_tokens for each in stats) / max(prompts, 1)
