"""Front ends before the simulated cores: one that has them itself, or several before a hub, which may be killed with
whatever they serve."""

from __future__ import annotations

import asyncio
from typing import Any

from simulated_client import SimulatedFrontEndClient, SimulatedHub, SimulatedReplicatedClient

from engine.core.client import CoreClient
from engine.errors import CoreDiedError, ShutDownError
from engine.front_ends.wire import FrontEndStart
from engine.serving import Serving

LEARNS_S = 0.2
"""in which the hub knows that a front end was killed"""


class Doors:
    def __init__(self, world: Any, client: SimulatedReplicatedClient, building: Any, count: int) -> None:
        """`client`: not started; `count`: of front ends."""
        self._world, self._client, self._building, self.count = world, client, building, count
        self._ready = client.start()
        self._numbers = self.kills = 0
        self._hub: SimulatedHub | None = None
        if count > 1:
            self._hub = SimulatedHub(world, world.config, client)
            self._running = world.loop.create_task(self._hub.run(self._ready))
        self.servings = [self._new() for _ in range(count)]
        """of those that take requests now"""

    def _new(self) -> Serving:
        return self._serving(self._client if self._hub is None else self._new_client(self._hub))

    def _serving(self, client: CoreClient) -> Serving:
        building = self._building
        return Serving(building.model, self._world.config, building.tokenizer, client, self._ready)

    def _new_client(self, hub: SimulatedHub) -> SimulatedFrontEndClient:
        self._numbers += 1
        number = self._numbers
        start = FrontEndStart(
            number=number, config=self._world.config, parent_pid=0, to_hub="", from_hub="", directory=""
        )
        client = SimulatedFrontEndClient(self._world, start, hub, self._ready)
        hub.receivers[number] = client.receiver.put  # type: ignore[attr-defined]
        client.start()
        return client

    @property
    def may_be_killed(self) -> bool:
        return self._hub is not None

    @property
    def is_dead(self) -> bool:
        """No core is ever to serve again."""
        return any(each.death is not None or each.closed for each in self.servings)

    def kill(self, place: int) -> Serving:
        """Whom it served is gone with it; the hub learns of it a moment later, and another one takes its place."""
        serving, hub, world = self.servings[place], self._hub, self._world
        assert hub is not None and isinstance(serving.client, SimulatedFrontEndClient)
        client = serving.client
        world.log("front end", client.number, "is killed")
        self.kills += 1
        client.to_hub.cut(world.rng.randint(0, 3))
        client.is_killed = True
        serving.die(CoreDiedError("killed"))
        serving._receiver.cancel()

        def lost() -> None:
            hub.lost(client.number)
            if client.number in hub._owners.values():
                world.broken(AssertionError("what a front end had that is gone goes on"))

        world.loop.call_later(world.rng.uniform(0.0, LEARNS_S), lost)
        self.servings[place] = self._new()
        return serving

    def check_nothing_is_left(self) -> None:
        for serving in self.servings:
            assert not serving.streams and not len(serving.processor) and not serving.processor._owners
        if self._hub is not None and not self.is_dead:
            assert not self._hub._owners, "the hub knows who waits for what is over"

    async def close(self) -> None:
        for serving in self.servings:
            await serving.stop(ShutDownError("the end"))
        if self._hub is not None:
            self._running.cancel()
            await asyncio.gather(self._running, return_exceptions=True)
            self._client.close()
