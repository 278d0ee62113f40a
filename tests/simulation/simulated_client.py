"""The front end's end of a simulated core: the real `ProcessClient` and `ReplicatedClient`, over queues in place of
sockets and a handle in place of a process."""

from __future__ import annotations

import asyncio
import threading
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from random import Random
from typing import Any, cast

import zmq
from simulated_core import ORDERLY, SimulatedCore

from engine.config import EngineConfig
from engine.core.client import ProcessClient
from engine.core.liveness import Liveness
from engine.core.outbox import Outbox
from engine.core.wire import CoreReady, ToCore
from engine.errors import CoreDiedError
from engine.front_ends.client import FrontEndClient
from engine.front_ends.hub import Hub
from engine.front_ends.wire import FrontEndStart, Joined, ToHub
from engine.replicas.client import ReplicatedClient
from engine.replicas.replica import Replica
from engine.replicas.restarts import WINDOW_S


class Pipe:
    """One direction of a connection: frames arrive in order, each when it has taken its time."""

    def __init__(self, rng: Random, delay_s: Callable[[], float], deliver: Callable[[bytes], None]) -> None:
        self._rng, self._delay_s, self._deliver = rng, delay_s, deliver
        self._loop = asyncio.get_running_loop()
        self._under_way: deque[bytes] = deque()
        self._last = 0.0

    def __len__(self) -> int:
        return len(self._under_way)

    def send(self, frame: bytes) -> None:
        self._under_way.append(frame)
        self._last = max(self._last, self._loop.time() + self._rng.expovariate(1 / self._delay_s()))
        self._loop.call_at(self._last, self._arrive)

    def _arrive(self) -> None:
        if self._under_way:  # else it was cut
            self._deliver(self._under_way.popleft())

    def cut(self, kept: int) -> None:
        """Who sent is dead: of what is under way so much arrives, at once, and the rest never left."""
        while self._under_way and kept:
            self._deliver(self._under_way.popleft())
            kept -= 1
        self._under_way.clear()


class _Receiver:
    """Of a PULL socket."""

    def __init__(self, changed: Callable[[], None]) -> None:
        self.frames: deque[bytes] = deque()
        self._changed = changed

    def put(self, frame: bytes) -> None:
        self.frames.append(frame)
        self._changed()

    def recv(self, flags: int) -> bytes:
        if not self.frames:
            raise zmq.Again
        return self.frames.popleft()

    def poll(self, timeout_ms: int) -> int:
        return len(self.frames)


class _Sender:
    """Of a PUSH socket with a bound."""

    def __init__(self, core: SimulatedCore, pipe: Pipe, most: int) -> None:
        self._core, self._pipe, self._most = core, pipe, most

    def send(self, frame: bytes, flags: int) -> None:
        if len(self._pipe) >= self._most:
            raise zmq.Again
        if self._core.alive:
            self._pipe.send(frame)


class _Handle:
    def __init__(self, core: SimulatedCore, pid: int) -> None:
        self._core, self.pid = core, pid
        self.sentinel = -1

    def wait_end(self, seconds: float) -> bool:
        if seconds and self._core.alive:  # it was told to stop, or is to be killed: nobody looks at what it does then
            self._core.die(ORDERLY)
        return not self._core.alive

    def kill(self) -> None:
        self._core.die("killed by signal 9 (SIGKILL)")

    destroy = kill

    def exit_cause(self) -> str:
        return self._core.cause

    def report(self, cause: str) -> str:
        return cause

    def dump_stacks(self) -> None:
        """Nobody reads them."""


class _Directory:
    path = from_core = to_core = ""

    def remove(self) -> None:
        """There is none."""


class _Begun:
    """What a core has noted, without a file."""

    def __init__(self, names: set[str]) -> None:
        self._names = names

    def has_any(self, names: Iterable[str]) -> bool:
        return not self._names.isdisjoint(names)


class SimulatedProcessClient(ProcessClient):
    def __init__(self, world: Any, config: EngineConfig) -> None:
        super().__init__(config)
        self._world = world

    def begun(self) -> Any:
        return _Begun(self.simulated.begun)

    def start(self) -> CoreReady:
        self._started = True
        world, most = self._world, self._config.limits.frames
        directory, receiver = _Directory(), _Receiver(world.changed)
        self.from_core = Pipe(world.rng, world.delay_s, receiver.put)
        self.simulated = core = world.new_core(self, self._config, self.from_core.send)
        to_core = Pipe(world.rng, world.delay_s, core.receive)
        handle = _Handle(core, world.pid_of(core))
        sender = _Sender(core, to_core, most)
        self._directory, self._receiver, self._handle = directory, receiver, handle  # type: ignore[assignment]
        self._finalizer = handle.destroy  # type: ignore[assignment]
        self._liveness = Liveness(self._hang_timeout_s, asyncio.get_running_loop().time())
        self._outbox = self._outbox_of(sender)  # type: ignore[arg-type]
        if world.fails_to_start():
            self._died = "it did not start"
            core.die(self._died)
            self.close()
            raise CoreDiedError(self._died)
        core.start()
        self.from_core.cut(1 << 30)
        ready = self._next()
        assert isinstance(ready, CoreReady)
        self._ready = True
        return ready


class _NoThread:
    """Who starts cores does so in events."""

    def join(self) -> None:
        """Nothing runs."""


class SimulatedReplicatedClient(ReplicatedClient):
    """Whatever the others do is looked at when something has changed, or it is time to."""

    def __init__(self, world: Any, config: EngineConfig) -> None:
        def make(config: EngineConfig, cpus: object, group_fd: object) -> ProcessClient:
            return SimulatedProcessClient(world, config)

        super().__init__(config, make)
        self._world = world
        self._news: asyncio.Event = asyncio.Event()

    def _start_many(self, size: int) -> list[Replica[ProcessClient]]:
        return [self._start_one() for _ in range(size)]

    def _take_away(self, replicas: Sequence[Replica[ProcessClient]]) -> None:
        for replica in replicas:
            replica.leaving = True
        self._fleet.let_go()
        self.changed()

    def wake_up(self, config: EngineConfig | None = None) -> None:
        super().wake_up(config)
        self.changed()

    def send(self, message: ToCore) -> None:
        super().send(message)
        if self._fleet.told:
            self.changed()

    def changed(self) -> None:
        self._news.set()

    async def recv_async(self) -> Any:
        with self._receiving():
            while (outputs := self._poll()) is None:
                self._news.clear()
                waits = [client.wait_s for client in self._clients]
                looks = [] if self._look_s is None else [self._look_s]
                try:
                    await asyncio.wait_for(self._news.wait(), min([60.0, *waits, *looks]))
                except TimeoutError:
                    continue
            return outputs

    def _follow_later(self) -> None:
        def follow() -> None:
            for _ in range(0 if self._leaving.is_set() else self._missing):
                self._follow_in(0.0)

        self._world.loop.call_later(WINDOW_S, follow)

    def _follow_in(self, wait_s: float) -> None:
        attempt = cast(threading.Thread, _NoThread())
        self._following.add(attempt)

        def follow() -> None:
            again = None if self._leaving.is_set() else self._try_to_follow()
            if again is not None:
                self._world.loop.call_later(again + self._world.start_s(), follow)
            else:
                self._following.discard(attempt)
                self.changed()

        self._world.loop.call_later(wait_s + self._world.start_s(), follow)


class _Bounded:
    """Of a PUSH socket: a pipe that takes so many frames at a time."""

    def __init__(self, pipe: Pipe, most: int | None) -> None:
        self._pipe, self._most = pipe, most

    def send(self, frame: bytes, flags: int) -> None:
        if self._most is not None and len(self._pipe) >= self._most:
            raise zmq.Again
        self._pipe.send(frame)

    def close(self) -> None:
        self._pipe.cut(0)


class _Nobody:
    """Of a process that does not end, and of a context without sockets."""

    def poll(self, timeout_ms: int) -> list[object]:
        return []

    def destroy(self, linger: int) -> None:
        """There is nothing."""


class SimulatedFrontEndClient(FrontEndClient):
    """A front end's process: what it sends to the hub takes its time, and what the hub sends to it."""

    wait_s = 20.0

    def __init__(self, world: Any, start: FrontEndStart, hub: SimulatedHub, ready: CoreReady) -> None:
        super().__init__(start)
        self._news = asyncio.Event()
        self.receiver, self.sentinel = _Receiver(self._news.set), -1  # type: ignore[assignment]
        self._context, self._end_of_hub = _Nobody(), _Nobody()  # type: ignore[assignment]
        self.to_hub = Pipe(world.rng, world.delay_s, hub.receive)
        self._outbox = Outbox(_Bounded(self.to_hub, self.config.limits.frames), self.config.limits.message("frames"))  # type: ignore[arg-type]
        self._ready = ready
        self.is_killed = False

    def start(self) -> CoreReady:
        """Before it hears it."""
        self._post(Joined())
        self.serves()
        return self._ready

    def _post(self, message: ToHub) -> None:
        if not self.is_killed:
            super()._post(message)

    async def recv_async(self) -> Any:
        while (outputs := self._poll()) is None:
            if self.receiver.frames:  # type: ignore[attr-defined]  # what came was not for whoever receives
                continue
            self._news.clear()
            with suppress(TimeoutError):
                await asyncio.wait_for(self._news.wait(), self.wait_s)
        return outputs

    def close(self) -> None:
        self._closed = True


class SimulatedHub(Hub):
    look_s = 20.0

    def __init__(self, world: Any, config: EngineConfig, client: SimulatedReplicatedClient) -> None:
        self._world = world
        self.pipes: dict[int, Pipe] = {}
        """to front ends"""
        self.receivers: dict[int, Callable[[bytes], None]] = {}
        super().__init__(config, client, _Directory())  # type: ignore[arg-type]

    def receive(self, frame: bytes) -> None:
        self._receiver.put(frame)  # type: ignore[attr-defined]
        self._take_in()

    def _listen(self) -> Any:
        return _Receiver(lambda: None)

    def _connect(self, number: int) -> Any:
        self.pipes[number] = Pipe(self._world.rng, self._world.delay_s, self.receivers[number])
        return _Bounded(self.pipes[number], None)

    def _watch(self, watches: bool) -> None:
        """It is told."""

    def close(self) -> None:
        """There is nothing."""
