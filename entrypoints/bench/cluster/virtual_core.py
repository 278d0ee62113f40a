"""A core on a virtual clock: the engine's own loop, scheduler and KV cache; only its steps take what a table says."""

from __future__ import annotations

import functools
from collections.abc import Callable

import msgspec

from engine.config import EngineConfig
from engine.core.begun import Begun
from engine.core.inbox import Message
from engine.core.start import build_core
from engine.core.wire import CoreStats, StepOutputs, ToCore
from engine.kv_transfer.interface import Connector
from entrypoints.bench.cluster.clock import Clock
from entrypoints.bench.cluster.costs import StepCosts
from entrypoints.bench.cluster.neighbours import Neighbours
from entrypoints.bench.cluster.stages import Stages
from entrypoints.bench.cluster.virtual import VirtualExecutor


class VirtualCore:
    """It turns when it has work and the step before has ended. What it says is heard at that step's end; what arrives
    meanwhile waits in its inbox, as messages do."""

    def __init__(
        self,
        config: EngineConfig,
        costs: StepCosts,
        stages: Stages,
        clock: Clock,
        connect: Callable[[VirtualCore], Connector] | None = None,
        neighbours: Neighbours | None = None,
    ) -> None:
        """`config`: of one replica. `connect`: makes its side of what moves pages. `neighbours`: as `VirtualExecutor`
        has them."""
        self.hears: Callable[[StepOutputs], None] = lambda _: None
        """who is told its outputs, at their time"""
        self.lost = False
        self.stats = CoreStats()
        self._clock, self._executor, self._turns = clock, VirtualExecutor(costs, stages, neighbours), False
        told = connect is None and config.cache.enable_prefix_caching  # as the engine's own cores: by the router
        cache = msgspec.structs.replace(config.cache, tell_front_end=told)
        connector = None if connect is None else connect(self)
        alone = msgspec.structs.replace(config, cache=cache)
        self._loop, self.ready = build_core(alone, self._executor, connector=connector)

    @property
    def now(self) -> float:
        """Within a turn, as far as that has come."""
        return max(self._clock.now, self._executor.now)

    def send(self, message: ToCore) -> None:
        self.put(message)

    def put(self, message: Message) -> None:
        self._loop.inbox.put(message)
        self._clock.at(self._clock.now, self._start)

    def stalled(self) -> str | None:
        return None

    def begun(self) -> Begun:
        return Begun(None)

    def _start(self) -> None:
        if self._turns or self.lost or not self._loop.has_work:
            return
        self._turns = True
        self._executor.now = self._clock.now
        outputs = self._loop.turn(wait=False)
        self._clock.at(self._executor.now, functools.partial(self._ended, outputs))

    def _ended(self, outputs: StepOutputs | None) -> None:
        self._turns = False
        if self.lost:
            return
        self._clock.at(self._clock.now, self._start)
        if outputs is not None:
            self.stats = outputs.stats
            self.hears(outputs)
