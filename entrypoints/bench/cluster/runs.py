"""A layout's runs, one for each seed: on the virtual clock, and on this machine."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Sequence

import msgspec

from engine.config import EngineArgs, EngineConfig
from engine.errors import EngineError
from engine.models.description import ModelDescription
from engine.resolve import resolve_here
from entrypoints.bench.cluster.apart import apart_args, prefill_apart
from entrypoints.bench.cluster.costs import StepCosts, check_costs
from entrypoints.bench.cluster.layouts import Layout
from entrypoints.bench.cluster.neighbours import Neighbours
from entrypoints.bench.cluster.outcome import Outcome, for_all, mean_of
from entrypoints.bench.cluster.real import run_really
from entrypoints.bench.cluster.real_apart import run_really_apart
from entrypoints.bench.cluster.routers import ROUTERS
from entrypoints.bench.cluster.simulate import Cluster, replicated
from entrypoints.bench.cluster.stages import stages_of
from entrypoints.bench.cluster.traffic import Arrival, Traffic, arrivals, check
from entrypoints.bench.cluster.transfers import Link

_WARM_UP_SEED = 1 << 20
"""no run's"""


class Runs:
    def __init__(
        self,
        options: argparse.Namespace,
        args: EngineArgs,
        costs: StepCosts,
        traffic: Traffic,
        layouts: Sequence[Layout],
    ) -> None:
        """Raises ConfigError for what none of `layouts` can be run with."""
        self._options, self._args, self._costs, self._traffic = options, args, costs, traffic
        self._resolved = {each.stages: self._resolve(args, each.stages) for each in layouts}
        self._apart: list[EngineConfig] = []
        if any(each.prefill for each in layouts):
            self._apart = [self._resolve(role, 1)[1] for role in apart_args(args)]

    def simulated(self, layout: Layout, times: int = 1, pace: float = 1.0) -> Outcome:
        """`times`: so many of it. `pace`: what steps take, of what the table says. Raises EngineError for requests that
        none of them can end."""
        options, layout = self._options, layout.times(times)
        if options.lose_at is not None and layout.servers == 1:
            raise EngineError("there is one server, and it is lost")
        cell = min(options.cell or layout.servers, layout.servers)
        share = self._traffic.of_some(cell / layout.servers)

        def run(seed: int) -> Outcome:
            return self._cluster(layout, cell, pace).run(self._given(share, seed), options.lose_at)

        return self._mean(layout, run)

    def real(self, layout: Layout) -> Outcome:
        def run(seed: int) -> Outcome:
            given = self._given(self._traffic, seed)
            if layout.prefill:
                warm_up = self._given(self._traffic, _WARM_UP_SEED)[:1]
                model = self._resolved[1][1].model.served_name
                return run_really_apart(self._args, model, layout, given, warm_up)
            config = self._resolved[layout.stages][1]
            parallel = msgspec.structs.replace(config.parallel, data=layout.replicas)
            of_all = msgspec.structs.replace(config, parallel=parallel)
            router = ROUTERS[self._options.router](config.cache.block_size)
            return run_really(of_all, router, given, self._costs)

        return self._mean(layout, run)

    def _cluster(self, layout: Layout, cell: int, pace: float) -> Cluster:
        options, costs = self._options, self._costs.at_pace(pace)
        neighbours = Neighbours(costs.beside) if options.real else None  # all are on this machine
        if layout.prefill:
            link = Link(options.transfer_ms / 1e3, options.transfer_mb_per_s * 1e6)
            prefill, decode = self._apart
            return prefill_apart(prefill, decode, costs, layout, link, neighbours)
        model, config = self._resolved[layout.stages]
        router = ROUTERS[options.router](config.cache.block_size)
        hop_s = (options.hop_ms or 0.0) / 1e3
        return replicated(config, costs, cell, router, stages_of(model.spec, layout.stages, hop_s), neighbours)

    def _resolve(self, args: EngineArgs, stages: int) -> tuple[ModelDescription, EngineConfig]:
        model, config = resolve_here(msgspec.structs.replace(args, pipeline_parallel_size=stages))
        computes = args.threads is not None or self._options.real
        check_costs(self._costs, config, () if computes else ("threads",))
        check(self._traffic, config.model.max_model_len)
        return model, config

    def _given(self, traffic: Traffic, seed: int) -> list[Arrival]:
        [config, *_] = [config for _, config in self._resolved.values()]
        return arrivals(traffic, self._options.seconds, seed, config.model.vocab_size)

    def _mean(self, layout: Layout, run: Callable[[int], Outcome]) -> Outcome:
        outcomes = []
        for seed in range(self._options.seeds):
            print(f"{layout}: run {seed + 1} of {self._options.seeds}", file=sys.stderr, flush=True)
            outcomes.append(for_all(run(seed), layout))
        return mean_of(outcomes)
