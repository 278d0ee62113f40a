"""A cluster on a virtual clock: the engine's own router, takeover, loop, scheduler and KV cache; only steps are not
computed, and take what a table says.

Each core turns when it has work and the step before has ended. What it says is heard at that step's end; what arrives
meanwhile waits in its inbox, as messages do.
"""

from __future__ import annotations

import functools
import heapq
import itertools
from collections.abc import Callable, Sequence

import msgspec

from engine.config import EngineConfig
from engine.core.start import build_core
from engine.core.wire import CoreStats, StepOutputs, ToCore
from engine.errors import CoreDiedError, EngineError
from engine.replicas.fleet import Fleet, Replica
from engine.replicas.router import Router
from entrypoints.bench.cluster.costs import StepCosts
from entrypoints.bench.cluster.outcome import Outcome, Seen
from entrypoints.bench.cluster.stages import Stages
from entrypoints.bench.cluster.traffic import Arrival
from entrypoints.bench.cluster.virtual import VirtualExecutor


class VirtualCore:
    """A core that is lent time: `turn` says what it tells, and when."""

    def __init__(self, config: EngineConfig, costs: StepCosts, stages: Stages, wake: Callable[[], None]) -> None:
        """`wake`: called when something was sent to it."""
        self._wake = wake
        self._executor = VirtualExecutor(costs, stages)
        cache = msgspec.structs.replace(config.cache, tell_front_end=config.cache.enable_prefix_caching)
        self._loop, self.ready = build_core(msgspec.structs.replace(config, cache=cache), self._executor)
        self.turns = False
        """a step of it is under way"""
        self.lost = False

    def send(self, message: ToCore) -> None:
        self._loop.inbox.put(message)
        self._wake()

    def stalled(self) -> str | None:
        return None

    @property
    def has_work(self) -> bool:
        return self._loop.has_work

    def turn(self, now: float) -> tuple[StepOutputs | None, float]:
        """From `now` on; what it has to tell, and when."""
        self._executor.now = now
        outputs = self._loop.turn(wait=False)
        return outputs, self._executor.now


class Cluster:
    """One run, of engines whose stages have a machine each."""

    def __init__(
        self,
        config: EngineConfig,
        costs: StepCosts,
        replicas: int,
        router: Router,
        stages: Stages = Stages(),  # noqa: B008  # it is frozen
    ) -> None:
        """`stages`: as many as `config` has."""
        alone = msgspec.structs.replace(config, parallel=msgspec.structs.replace(config.parallel, data=1))
        self._fleet: Fleet[VirtualCore] = Fleet(router)
        self._all: list[Replica[VirtualCore]] = []
        self._awake: set[int] = set()
        """replicas that may have something to do"""
        for number in range(replicas):
            core = VirtualCore(alone, costs, stages, functools.partial(self._awake.add, number))
            self._all.append(Replica(number, number, core, core.ready))
            self._fleet.add(self._all[-1])
        self._events: list[tuple[float, int, Arrival | Replica[VirtualCore] | None, StepOutputs | None]] = []
        self._order = itertools.count()
        self._stats: dict[int, CoreStats] = {}

    def run(self, arrivals: Sequence[Arrival], lose_at_s: float | None = None) -> Outcome:
        """`lose_at_s`: when a replica is lost, the first one. Raises EngineError for requests that cannot end."""
        seen = Seen(arrivals)
        for arrival in arrivals:
            self._at(arrival.at_s, arrival, None)
        if lose_at_s is not None:
            self._at(lose_at_s, None, None)
        while self._events:
            now, _, what, outputs = heapq.heappop(self._events)
            if isinstance(what, Arrival):
                self._fleet.send(what.message)
            elif what is None:
                self._lose(self._fleet.replicas[0], seen, now)
            elif not what.client.lost:
                what.client.turns = False
                self._awake.add(what.number)
                if outputs is not None:
                    seen.take_in(self._fleet.take_in(what, outputs), now)
                    self._stats[what.number] = outputs.stats
            for number in sorted(self._awake):
                self._start(self._all[number], now)
            self._awake.clear()
            while self._fleet.told:
                seen.take_in(self._fleet.told.popleft(), now)
        if seen.left:
            raise EngineError(f"{seen.left} requests can never end: they do not fit")
        return self._outcome(seen)

    def _at(self, when: float, what: Arrival | Replica[VirtualCore] | None, outputs: StepOutputs | None) -> None:
        heapq.heappush(self._events, (when, next(self._order), what, outputs))

    def _start(self, replica: Replica[VirtualCore], now: float) -> None:
        core = replica.client
        if not core.turns and not core.lost and core.has_work:
            core.turns = True
            outputs, end = core.turn(now)
            self._at(end, replica, outputs)

    def _lose(self, replica: Replica[VirtualCore], seen: Seen, now: float) -> None:
        replica.client.lost = True
        seen.take_in(self._fleet.lost(replica, CoreDiedError("lost, as it was to be")), now)

    def _outcome(self, seen: Seen) -> Outcome:
        stats = [self._stats.get(number, CoreStats()) for number in range(len(self._all))]
        return seen.outcome(len(self._all), *loads_and_hits(stats))


def loads_and_hits(stats: Sequence[CoreStats]) -> tuple[list[int], float]:
    """Tokens that each computed, and the share of prompts' tokens that caches had."""
    loads = [each.prompt_tokens - each.prefix_hit_tokens + each.generated_tokens for each in stats]
    prompts = sum(each.prompt_tokens for each in stats)
    return loads, sum(each.prefix_hit_tokens for each in stats) / max(prompts, 1)
