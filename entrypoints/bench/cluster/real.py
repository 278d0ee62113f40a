"""The same traffic on real replicas of this machine, to compare with."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence

import msgspec

from engine.config import EngineConfig
from engine.core.wire import CoreStats
from engine.replicas.client import ReplicatedClient
from engine.replicas.router import Router
from entrypoints.bench.cluster.costs import StepCosts
from entrypoints.bench.cluster.outcome import Outcome, Seen
from entrypoints.bench.cluster.pace import Pace
from entrypoints.bench.cluster.simulate import loads_and_hits
from entrypoints.bench.cluster.traffic import Arrival


def run_really(config: EngineConfig, router: Router, arrivals: Sequence[Arrival], costs: StepCosts) -> Outcome:
    """As many replicas as `config` has. `costs`: what its pace is told beside. Raises what an engine's start raises,
    and `CoreDiedError`."""
    client = ReplicatedClient(config, router=router)
    try:
        client.start()
        client.wait_compiled()
        pace = Pace(costs, arrivals)
        outcome = asyncio.run(_serve(client, arrivals, pace))
        found = pace.found if config.parallel.pipeline == 1 else None  # steps of stages overlap
        return msgspec.structs.replace(outcome, pace=found)
    finally:
        client.close()


async def _serve(client: ReplicatedClient, arrivals: Sequence[Arrival], pace: Pace) -> Outcome:
    seen, began = Seen(arrivals), time.monotonic()

    async def send() -> None:
        for arrival in arrivals:
            await asyncio.sleep(max(arrival.at_s - (time.monotonic() - began), 0.0))
            client.send(arrival.message)

    sending = asyncio.create_task(send())
    stats: Sequence[CoreStats] = ()
    while seen.left:
        outputs = await client.recv_async()
        seen.take_in(outputs, time.monotonic() - began)
        pace.take_in(outputs)
        stats = [*client.stats_of_each().values()]
    await sending
    return seen.outcome(*loads_and_hits(stats))
