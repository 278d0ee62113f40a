"""Ranks that somebody else places, and the driver that they join over the network."""

from __future__ import annotations

import os
import secrets
import select
import time
from collections.abc import Callable, Iterator, Mapping, Sequence, Set
from contextlib import ExitStack, suppress
from pathlib import Path
from socket import SHUT_RDWR, socket
from typing import TYPE_CHECKING, Literal, Protocol, TypeVar, cast

import msgspec

from engine.config import EngineConfig
from engine.errors import EngineError
from engine.executor.agent import boot_id
from engine.executor.agent_frames import (
    VERSION,
    AgentStream,
    Ended,
    Hello,
    Memory,
    Share,
    Shared,
    Spawn,
    Spawned,
    Stream,
)
from engine.executor.connections import Address, Listener
from engine.executor.frames import RankEnds, StreamKind, WorkerStart
from engine.executor.joining import join, named
from engine.executor.ranks import Parts, rank_config
from engine.executor.remote_worker import RemoteWorker
from engine.executor.worker_link import Handle
from engine.parallel.group_memory import SLOT_BYTES
from engine.parallel.stage_group import neighbours

if TYPE_CHECKING:
    from engine.parallel.group import OwnGroup

Kind = Literal["agent", "frames"] | StreamKind
M = TypeVar("M", Hello, Shared, Spawned)
LOOK_S = 0.2
"""how often who waits for agents asks whether they can still come"""


class Places(Protocol):
    """Who starts an agent (`agent.serve_rank`) for each rank but the driver's, wherever that is."""

    def host(self) -> str:
        """Under which address agents reach this host."""
        ...

    def place(self, ranks: Sequence[int], driver: Address, secret: bytes, timeout_s: float) -> None:
        """Returns once their places are known; agents come later. Raises `EngineError`."""
        ...

    def check(self) -> None:
        """Raises `EngineError` where an agent cannot come any more."""
        ...

    def node(self) -> str:
        """The driver's, as `AgentTask.node` is an agent's; known once the others are placed."""
        ...

    def cause_of(self, rank: int) -> str | None:
        """What is known of the loss of its agent; may wait for a second."""
        ...

    def close(self) -> None:
        """Nothing that was placed is left. Idempotent."""
        ...


class RemoteRanks:
    """`Ranks` that join by streams. Those of one node share memory: all of them, or those that compute a stage."""

    def __init__(self, config: EngineConfig, parts: Parts, places: Places) -> None:
        self._config, self._size = config, config.parallel.ranks
        self._stages, self._tensor = config.parallel.pipeline, config.parallel.tensor
        self._parts, self._places = parts, places
        self._timeout_s = config.parallel.timeout_s
        self._cache_dir = Path(config.compile.cache_dir)
        self._held = ExitStack()
        self._memory = self._parts_memory = -1
        """of all ranks, and of those that compute the driver's stage"""
        self._own: dict[tuple[Kind, int], socket] = {}
        """rank 0's streams to others"""
        self._workers: list[RemoteWorker] = []
        self.caches: list[int] = []
        self._hosts = [boot_id()]
        try:
            self._held.callback(places.close)
            self._secret = secrets.token_bytes(32)
            host = places.host()
            self._listener = Listener(host, self._secret)
            self._held.callback(self._listener.close)
            self._address = host, self._listener.port
        except BaseException:
            self.close()
            raise

    def start(self, starts: Sequence[WorkerStart]) -> Iterator[Handle]:
        ranks = [start.rank for start in starts]
        deadline = time.monotonic() + self._timeout_s
        self._places.place(ranks, self._address, self._secret, self._timeout_s)
        with ExitStack() as unused:
            joined = self._streams({("agent", rank) for rank in ranks}, deadline, unused)
            agents = {rank: AgentStream(stream) for (_, rank), stream in joined.items()}
            hellos = {rank: self._told(Hello, rank, agent, deadline) for rank, agent in agents.items()}
            for rank, hello in hellos.items():
                if hello.version != VERSION:
                    raise EngineError(f"rank {rank} runs another version of the engine, at {hello.address[0]}")
            self._hosts += [hellos[rank].host for rank in ranks]
            its = {rank: f"{hello.host} {hello.node}" for rank, hello in hellos.items()}
            nodes = [f"{boot_id()} {self._places.node()}", *(its[rank] for rank in ranks)]
            addresses = [self._address, *(hellos[rank].address for rank in ranks)]
            memory, of_stages = self._shared(nodes, agents, deadline)
            for start in starts:
                start = msgspec.structs.replace(start, config=self.config_of(start.rank))
                of_stage = of_stages[start.rank // self._tensor]
                wanted = self._wanted(start.rank, memory, of_stage)
                streams = tuple(Stream(kind, rank, addresses[rank]) for kind, rank in wanted)
                agents[start.rank].tell(Spawn(start, streams, memory, of_stage))
            awaited: set[tuple[Kind, int]] = {("frames", rank) for rank in ranks}
            awaited.update(self._wanted(0, memory, of_stages[0]))
            streams_of = self._streams(awaited, deadline, unused, agents)
            pids = {rank: self._told(Spawned, rank, agents[rank], deadline).pid for rank in ranks}
            self._own = {key: stream for key, stream in streams_of.items() if key[0] != "frames"}
            unused.pop_all()
        self._listener.close()
        for rank in ranks:
            where = f"process {pids[rank]} on {hellos[rank].address[0]}"
            frames = streams_of["frames", rank]
            worker = RemoteWorker(rank, pids[rank], where, agents[rank], frames, self._places.cause_of)
            self._workers.append(worker)
            yield worker

    def config_of(self, rank: int) -> EngineConfig:
        return self._config if self._memory < 0 else rank_config(self._config, rank)

    def join(self) -> OwnGroup:
        streams: dict[StreamKind, dict[int, int]] = {}
        for (kind, rank), stream in self._own.items():
            if kind != "agent" and kind != "frames":
                streams.setdefault(kind, {})[rank] = stream.fileno()
        ends = RankEnds(memory=self._memory, parts_memory=self._parts_memory, streams=streams)
        group = join(self._config, 0, ends, self._parts)
        for key in [key for key in self._own if key[0] != "states"]:
            self._own.pop(key).detach()  # it is the group's
        return group

    def hosts(self) -> list[str]:
        return self._hosts

    def abort(self, reason: str, is_lost: bool) -> None:
        """Parts of a stage on another node wait for each other alone, so they are ended where one is lost."""
        for stream in list(self._own.values()):
            with suppress(OSError):
                stream.shutdown(SHUT_RDWR)
        for worker in self._workers if is_lost and self._stages > 1 else []:
            worker.kill()

    def close(self) -> None:
        for stream in self._own.values():
            stream.close()
        self._own = {}
        self._held.close()
        for memory in (self._memory, self._parts_memory):
            if memory >= 0:
                os.close(memory)
        self._memory = self._parts_memory = -1

    def _wanted(self, rank: int, memory: Memory | None, of_stage: Memory | None) -> list[tuple[StreamKind, int]]:
        """The streams of a rank, as what they are for and to whom."""
        wanted: list[tuple[StreamKind, int]] = []
        if memory is None:
            wanted += [("sums", other) for other in range(self._size) if other != rank]
        if self._stages > 1:
            first = rank - rank % self._tensor
            others = [other for other in range(first, first + self._tensor) if other != rank]
            wanted += [("parts", other) for other in others if of_stage is None]
            wanted += [("states", other) for other in neighbours(rank, self._stages, self._tensor) if other is not None]
        return wanted

    def _shared(
        self, nodes: Sequence[str], agents: Mapping[int, AgentStream], deadline: float
    ) -> tuple[Memory | None, list[Memory | None]]:
        """The memory of all ranks, and of the parts of each stage, in the order of their ranks; None: they are not on
        one node, or alone."""
        memory = None
        if len(set(nodes)) == 1:
            self._memory = self._allocated(self._size)
            memory = os.getpid(), self._memory
        of_stages: list[Memory | None] = [None] * self._stages
        for index in range(self._stages if self._stages > 1 and self._tensor > 1 else 0):
            first = index * self._tensor
            if len(set(nodes[first : first + self._tensor])) > 1:
                continue
            if index == 0:
                self._parts_memory = self._allocated(self._tensor)
                of_stages[0] = os.getpid(), self._parts_memory
            else:
                agents[first].tell(Share(self._tensor))
                of_stages[index] = self._told(Shared, first, agents[first], deadline).memory
        return memory, of_stages

    def _allocated(self, ranks: int) -> int:
        return cast(Callable[[int, int], int], named(self._parts.allocate))(ranks, SLOT_BYTES)

    def _streams(
        self,
        wanted: Set[tuple[Kind, int]],
        deadline: float,
        held: ExitStack,
        agents: Mapping[int, AgentStream] | None = None,
    ) -> dict[tuple[Kind, int], socket]:
        """Those of the ranks, which `held` closes. Raises `EngineError`, also where an agent gives up."""
        missing = set(wanted)
        found: dict[tuple[Kind, int], socket] = {}
        while missing:
            joined = self._listener.next(LOOK_S)
            if joined is not None:
                held.callback(joined.stream.close)
                key = joined.purpose.kind, joined.purpose.rank
                if key in missing:
                    missing.remove(key)
                    found[key] = joined.stream
                continue
            for rank, agent in (agents or {}).items():
                agent.read()
                if agent.lost is not None:
                    self._told(Spawned, rank, agent, deadline)
            self._check(deadline, sorted({rank for _, rank in missing}))
        return found

    def _told(self, kind: type[M], rank: int, agent: AgentStream, deadline: float) -> M:
        """The next message of an agent. Raises `EngineError` where it is another one, or none."""
        poll = select.poll()
        poll.register(agent, select.POLLIN)
        while True:
            agent.read()
            match agent.of_agent():
                case Ended(cause=cause):
                    raise EngineError(f"rank {rank}: {cause}")
                case None if agent.lost is not None:
                    raise EngineError(f"rank {rank} left while it was started: {agent.lost}")
                case None:
                    poll.poll(1000 * LOOK_S)
                    self._check(deadline, [rank])
                case message if isinstance(message, kind):
                    return message
                case message:
                    raise EngineError(f"rank {rank}'s agent sent {type(message).__name__} before {kind.__name__}")

    def _check(self, deadline: float, missing: Sequence[int]) -> None:
        self._places.check()
        if time.monotonic() >= deadline:
            those = ", ".join(map(str, missing))
            raise EngineError(
                f"ranks {those} did not join at {self._address[0]}, port {self._address[1]}, within "
                f"{self._timeout_s:g} s: see their logs, and whether a firewall lies between; "
                "distributed_timeout_seconds is how long they may take"
            )
