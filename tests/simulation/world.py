"""A world from a seed: an engine of simulated cores, its guests, and what befalls them. Everything is an event of one
loop, so that a seed is all that is needed to see it again."""

from __future__ import annotations

import asyncio
import hashlib
import logging
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from random import Random
from typing import Any
from unittest import mock

from guests import Guest, Wish, draw_wishes
from msgspec.structs import replace
from simulated_client import SimulatedProcessClient, SimulatedReplicatedClient
from simulated_core import FAULTY, KILLER, ORDERLY, Shape, SimulatedCore
from simulated_doors import LEARNS_S, Doors
from tiny_front import config_of
from virtual_time import VirtualLoop

from engine.config import EngineConfig
from engine.core import client as core_client
from engine.errors import ConfigError, CoreDiedError, QueueFullError
from engine.frontend.tokenizer import Tokenizer
from engine.layer_groups import State, most_blocks
from engine.models.description import ModelDescription, describe
from engine.replicas import stop_watch
from engine.scheduling.shares import OWN_OF_LEFT
from engine.serving import Serving
from engine.speculation_config import SpeculationConfig

LONGEST = 64
"""of the model's context"""
PATIENCE_S = 24 * 3600.0
"""in which everybody has been served, whatever happens"""


NOTICED_S = 2.0
"""behind its limit a core that hangs is dead"""


class BrokenError(AssertionError):
    """What must hold does not."""


class Building:
    """What worlds have in common: a tiny model's files, read once."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.model: ModelDescription = describe(str(path))
        self.config = config_of(path, max_model_len=LONGEST, block_size=16, max_num_seqs=8, max_num_batched_tokens=64)
        self.tokenizer = Tokenizer.load(str(path), max_model_len=LONGEST)
        self.tokenizer.close = lambda: None  # type: ignore[method-assign]


class World:
    def __init__(self, seed: int, building: Building) -> None:
        self.seed, self._building = seed, building
        self.rng = rng = Random(seed)
        self.loop: VirtualLoop = asyncio.get_running_loop()  # type: ignore[assignment]
        self._digest = hashlib.blake2b(digest_size=16)
        self.lines: list[str] = []
        self._broken: list[BaseException] = []
        self.cores: list[SimulatedCore] = []
        self._clients: dict[SimulatedCore, SimulatedProcessClient] = {}
        self.deaths: list[str] = []
        self.kills_from_outside = self._jumps = self.slept = 0
        self._slow_s = rng.choice([0.0001, 0.001, 0.02])
        self._unlucky_starts = rng.choice([0, 0, 0, 1])
        self.config, self.shape = self._draw_engine()
        crowd = rng.choice([3, 8, 8, 16, 30])
        policy = self.config.scheduler.policy
        self._kills = rng.choice([0, 0, 1, 1, 2, 4])
        kills = rng.random() < 0.15
        self.wishes = draw_wishes(rng, policy, kills, crowd)
        self._prompts: dict[tuple[int, ...], int] = {}
        for wish in self.wishes:
            self.mark(wish)
        kept_on = 4 + 3 * 3  # replicas: who gets on a little before each death is no suspect by it
        needed = self._kills + kept_on * kills + self._unlucky_starts + 2
        self.may_end = rng.random() < 0.1
        self.config = replace(self.config, core_restarts=1 if self.may_end else needed)
        self.is_fair = policy == "fair"
        self._num_front_ends = rng.choice([1, 1, 1, 2, 3])
        self.doors: Doors
        self.client: SimulatedReplicatedClient
        self.digest = ""
        """of all that was seen"""
        self.happened: Counter[str] = Counter()

    def _draw_engine(self) -> tuple[EngineConfig, Shape]:
        rng, config = self.rng, self._building.config
        block_size = rng.choice([1, 2, 4, 16, 16])
        drafts, depth = rng.choice([0, 0, 0, 1, 3]), rng.choice([1, 2, 2])
        budget = rng.randint(4, 48)
        most = max(budget, depth * (1 + drafts))
        state = State(rng.randint(1, 3), block_size * rng.randint(1, 4))
        windows: Any = rng.choice([(None,), (None,), (None,), (5,), (None, 3), (4, 4), (None, state)])
        enough = sum(most_blocks(LONGEST, window, block_size, most) for window in windows)
        shape = Shape(
            num_blocks=enough + rng.choice([0, rng.randint(0, 20), 10 * enough]),
            block_size=block_size,
            num_host_blocks=rng.choice([0, 4, 40]),
            windows=windows,
            swap_block_s=rng.choice([0.0, 0.0001]),
            pads=rng.random() < 0.5,
            exact=rng.random() < 0.2,
            adapter_slots=rng.randint(1, 3),
            adapter_turns=rng.choice([0, 1, 3]),
            step_s=rng.choice([0.001, 0.01, 0.1]),
        )
        replicas = rng.choice([1, 1, 1, 2, 3])
        scheduling = replace(
            config.scheduler,
            max_num_seqs=rng.randint(2, 8),
            max_num_batched_tokens=budget,
            max_waiting=rng.choice([4, 20, 1000]),
            policy=rng.choice(["fcfs", "priority", "fair"]),
            steps_in_flight=depth,
            preemption=rng.choice(["auto", "recompute", "swap"]),
            min_shared_chunk=rng.choice([1, 4, 256]),
            speculation=SpeculationConfig(method="ngram" if drafts else None, num_speculative_tokens=drafts or 10),
        )
        cache = replace(
            config.cache,
            block_size=block_size,
            enable_prefix_caching=rng.random() < 0.8,
            tell_front_end=replicas > 1,
        )
        limits = replace(config.limits, frames=rng.choice([16, 1000, 1000]))
        parallel = replace(config.parallel, data=replicas)
        return replace(config, scheduler=scheduling, cache=cache, limits=limits, parallel=parallel), shape

    # -- what cores and clients ask ----------------------------------------------------------------------------------

    def new_core(
        self, client: SimulatedProcessClient, config: EngineConfig, to_front: Callable[[bytes], None]
    ) -> SimulatedCore:
        number = len(self.cores)
        core = SimulatedCore(self, config, self.shape, Random(self.rng.getrandbits(64)), to_front)
        self.cores.append(core)
        self._clients[core] = client
        self.log("core", number, "begins")
        return core

    def core_died(self, core: SimulatedCore) -> None:
        if core.cause != ORDERLY:
            self.deaths.append(core.cause)
        self.log("core", self.cores.index(core), core.cause)
        self._clients[core].from_core.cut(self.rng.randint(0, 3))
        self.changed()

    def changed(self) -> None:
        if hasattr(self, "client"):
            self.client.changed()

    def pid_of(self, core: SimulatedCore) -> int:
        return -1 - self.cores.index(core)

    def is_stopped(self, pid: int) -> bool:
        return self.cores[-1 - pid].is_stopped

    def delay_s(self) -> float:
        return self._slow_s

    def start_s(self) -> float:
        return self.rng.uniform(0.1, 10.0)

    def fails_to_start(self) -> bool:
        if self._unlucky_starts and len(self.cores) > self.config.parallel.data:
            self._unlucky_starts -= 1
            return True
        return False

    def mark(self, wish: Wish) -> None:
        """Where a prompt kills, or is faulty, somebody has to say from which token on."""
        if {KILLER, FAULTY} & {*wish.prompt}:
            self._prompts[tuple(wish.prompt)] = self.rng.randint(1, 40)

    def bad_at(self, tokens: list[int]) -> int:
        """How much may be computed of a sequence that kills, or is faulty."""
        return next(at for prompt, at in self._prompts.items() if tuple(tokens[: len(prompt)]) == prompt)

    def broken(self, error: BaseException) -> None:
        self._broken.append(error)

    def check_refusal(self, guest: Guest, error: QueueFullError) -> None:
        """Of one who was told that there is no room, or no time."""
        if "too short" in str(error) or "is over" in str(error):
            assert guest.wish.timeout_s is not None, f"who gave no time was told that it is too short: {error}"
            return
        if "waited for" in str(error) and "too long" in str(error):
            assert self.loop.time() - guest.asked_at >= self.config.limits.waiting_s, error
            return
        beside = [each for each in self.guests if each.message and each.ended_at >= guest.asked_at]
        if "would miss its deadlines" in str(error):
            assert guest.wish.timeout_s is not None, f"who gave no time was told that others' is too short: {error}"
            assert any(each.wish.timeout_s is not None for each in beside if each is not guest), error
            return
        sequences = sum(each.num_sequences for each in beside)
        room = self.config.scheduler.max_waiting
        if "for others" in str(error):
            assert self.is_fair
            room = room * OWN_OF_LEFT // (OWN_OF_LEFT + 1)
        if "under way" in str(error):  # messages, of which those that abort are some
            room = self.config.limits.frames // 2
        assert sequences > room, f"refused where there are {sequences}: {error}"

    # -- what happens ------------------------------------------------------------------------------------------------

    def log(self, *what: object) -> None:
        line = f"{self.loop.time():.9f} {' '.join(map(str, what))}"
        self._digest.update(line.encode())
        self.lines.append(line)

    def serve(self) -> None:
        self.client = SimulatedReplicatedClient(self, self.config)
        self.doors = Doors(self, self.client, self._building, self._num_front_ends)

    def serving_of(self, guest: Guest) -> Serving:
        """Who takes its requests now."""
        return self.doors.servings[self.guests.index(guest) % self.doors.count]

    async def leave(self, lives: Sequence[asyncio.Task[None]]) -> None:
        for each in lives:
            each.cancel()
        await self.doors.close()

    async def run(self) -> None:
        self.serve()
        self.guests = [Guest(self, wish, str(i // self.doors.count)) for i, wish in enumerate(self.wishes)]
        lives = self._lives = [self.loop.create_task(guest.live()) for guest in self.guests]
        for _ in range(self._kills):
            self.loop.call_later(self._moment(), self._befall)
        try:
            done, waiting = await asyncio.wait(lives, timeout=PATIENCE_S)
            if waiting:
                names = [guest.wish.name for guest in self.guests if guest.end == "not yet"]
                raise BrokenError(f"{names} wait for ever")
            for each in done:
                if not each.cancelled():  # else its front end was killed
                    each.result()
            await self._settle()
        finally:
            await self.leave(lives)
        if self._broken:
            raise self._broken[0]
        self.digest = self._digest.hexdigest()
        self._count()

    def _count(self) -> None:
        """What of all that can happen has."""
        self.happened.update(guest.end for guest in self.guests)
        self.happened["deaths"], self.happened["slept"] = len(self.deaths), self.slept
        self.happened["front_ends_killed"] = self.doors.kills
        self.happened["ranks_lost"] = sum("a rank has died" in each for each in self.deaths)
        self.happened["convicted"] = sum(KILLER in each.wish.prompt and each.end == "failed" for each in self.guests)
        for core in self.cores:
            stats = core.scheduler.stats()
            for name in ("preemptions", "preemptions_swapped", "prefix_hit_tokens", "accepted_tokens"):
                self.happened[name] += getattr(stats, name)
            self.happened["resumed"] += core.resumed

    def _moment(self) -> float:
        last = max(wish.arrives for wish in self.wishes)
        return self.rng.uniform(0.0, last + self.rng.choice([0.05, 1.0, 10.0]))

    def _befall(self) -> None:
        """One core is killed, or stands still for a while; or the whole machine does."""
        rng, alive = self.rng, [core for core in self.cores if core.alive]
        kind = rng.random()
        if kind < 0.1:
            seconds = rng.choice([1.0, 30.0, 3000.0])
            self.log("the machine sleeps for", seconds)
            self._jumps += 1
            self.loop.jump(seconds)
        elif kind < 0.2 and not self.client.is_sleeping:
            seconds = rng.choice([0.1, 20.0])
            self.log("the engine sleeps for", seconds)
            self.slept += 1
            self.client.sleep()
            self.loop.call_later(seconds, self._wake_up)
        elif kind < 0.3 and self.doors.may_be_killed:
            self._kill_front_end()
        elif kind < 0.36 and not self.client.is_sleeping and not self.doors.is_dead:
            self._scale(rng.randint(1, 3), rng.choice([0.0, 0.0, 0.05]))
        elif alive and kind < 0.45:
            core, seconds = rng.choice(alive), rng.choice([0.5, 15.0, 400.0])
            self.log("core", self.cores.index(core), "stands still for", seconds)
            core.stop_for(seconds)
            limit = self._clients[core]._hang_timeout_s + NOTICED_S
            if seconds > limit and not self._clients[core].idle:
                self.loop.call_later(limit, self._check_noticed, core, self._jumps)
        elif alive:
            self.kills_from_outside += 1
            core = rng.choice(alive)
            core.lose_rank() if rng.random() < 0.3 else core.crash()

    def _kill_front_end(self) -> None:
        killed = self.doors.kill(self.rng.randrange(self.doors.count))
        for guest, life in zip(self.guests, self._lives, strict=True):
            if getattr(guest, "serving", None) is killed and not life.done():
                guest.end, guest.ended_at = "cut_off", self.loop.time() + LEARNS_S
                life.cancel()

    def _scale(self, replicas: int, drain_s: float) -> None:
        self.log(f"{replicas} replicas are asked for, {drain_s} s to drain")
        self.happened["scaled"] += 1
        try:
            self.client.scale(replicas, drain_s)
        except (CoreDiedError, ConfigError) as error:  # one did not start, or all but one have died
            self.log(str(error).splitlines()[0])
        self.changed()

    def _wake_up(self) -> None:
        if not self.doors.is_dead:
            try:
                self.client.wake_up()
            except CoreDiedError:  # it did not start
                self.log("it sleeps on")
                self.loop.call_later(1.0, self._wake_up)

    def _check_noticed(self, core: SimulatedCore, jumps: int) -> None:
        """A core that had work and stood still is dead by now, unless nobody was awake to see it."""
        was_due = self._clients[core]._liveness.verdict(self.loop.time() - NOTICED_S)  # it may have become idle
        if core.alive and jumps == self._jumps and was_due is not None:
            self.broken(AssertionError(f"core {self.cores.index(core)} stands still, and nobody has noticed"))

    async def _settle(self) -> None:
        """Nobody wants anything any more, and nothing is left of anybody."""
        for _ in range(10):  # some of them may pass while the machine sleeps
            await asyncio.sleep(100.0)
        fleet = self.client._fleet
        self.doors.check_nothing_is_left()
        if self.doors.is_dead:
            assert self.may_end, f"the engine died: {[each.death for each in self.doors.servings]}"
            return
        assert not fleet._deliveries._requests and not fleet._deliveries._sequences, "the journal keeps who has left"
        assert not fleet.waiting.num_sequences
        assert not fleet._suspects._deaths, "who has left is still suspected"
        for replica in fleet.replicas:
            assert fleet.is_idle(replica.number), "the router counts work that is over"
            assert replica.client.idle and replica.client.stalled() is None, "an idle core does not count as idle"
            core: SimulatedCore = replica.client.simulated  # type: ignore[attr-defined]
            core.assert_empty()
        assert not self.client._starting and (self.may_end or not self.client._following), "somebody still starts"
        assert self.may_end or len(fleet.replicas) == self.client._wanted, "who died was not followed"


@contextmanager
def _quiet() -> Iterator[None]:
    before = logging.root.manager.disable
    logging.disable(logging.CRITICAL)
    try:
        yield
    finally:
        logging.disable(before)


def simulate(seed: int, building: Building, make: Callable[[int, Building], World] = World) -> World:
    """One life of the world, to its end. Raises what did not hold."""
    loop = VirtualLoop()
    kept: list[World] = []

    async def live() -> None:
        world = make(seed, building)
        kept.append(world)
        stopped: Any = world.is_stopped
        with (
            mock.patch.object(core_client, "is_stopped", stopped),
            mock.patch.object(stop_watch, "is_stopped", stopped),
        ):
            await world.run()

    try:
        with _quiet(), loop.everywhere():
            loop.run_until_complete(live())
    except Exception as error:
        last = "\n".join(kept[0].lines[-25:]) if kept else ""
        raise BrokenError(f"seed {seed}: {type(error).__name__}: {error}\n{last}") from error
    finally:
        loop.close()
    return kept[0]
