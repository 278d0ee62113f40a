"""A day on which an engine always has more to do than it can, and nothing befalls it: nobody must think it hangs."""

from __future__ import annotations

import asyncio
import itertools

from guests import Guest, draw_wishes
from msgspec.structs import replace
from world import Building, World

LOOK_S = 5.0


class SaturatedWorld(World):
    def __init__(self, seed: int, building: Building, seconds: float, step_s: float) -> None:
        """`step_s`: the mean of a step."""
        super().__init__(seed, building)
        self._seconds, self.looks = seconds, 0
        self._kills = self._unlucky_starts = 0
        self.may_end = False
        self.shape = replace(self.shape, step_s=step_s, num_blocks=max(self.shape.num_blocks, 100))
        scheduling = replace(self.config.scheduler, max_num_seqs=8, max_waiting=1000)
        self.config = replace(self.config, scheduler=scheduling, core_restarts=4)
        self._numbers = itertools.count()

    def log(self, *what: object) -> None:
        """It would be a long one."""

    async def run(self) -> None:
        self.serve()
        self.guests = []
        end = self.loop.time() + self._seconds
        lives = [self.loop.create_task(self._visit(end)) for _ in range(24)]
        try:
            while self.loop.time() < end:
                await asyncio.sleep(LOOK_S)
                self.looks += 1
                stalled = self.client.stalled()
                assert stalled is None and not self.deaths and not self._broken, (stalled, self.deaths, self._broken)
            await asyncio.gather(*lives)
            await self._settle()
        finally:
            await self.leave(lives)

    async def _visit(self, end: float) -> None:
        """One guest after the other."""
        while self.loop.time() < end:
            (wish,) = draw_wishes(self.rng, "fcfs", may_kill=False, crowd=1)
            name = f"guest-{next(self._numbers)}"
            guest = Guest(self, replace(wish, name=name, arrives=0.0, priority=0), name)
            self.mark(guest.wish)
            self.guests.append(guest)
            await guest.live()
            self.guests.remove(guest)
            await asyncio.sleep(0.01)  # who is refused comes back, but not at once
