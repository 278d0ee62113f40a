"""Ranks that somebody else places, and the driver that they join over the network."""

from __future__ import annotations

import os
import secrets
import select
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from socket import socket
from typing import TYPE_CHECKING, Literal, Protocol, TypeVar, cast

import msgspec

from engine.config import EngineConfig
from engine.errors import EngineError
from engine.executor.agent import boot_id
from engine.executor.agent_frames import VERSION, AgentStream, Ended, Hello, Spawn, Spawned
from engine.executor.connections import Address, Listener
from engine.executor.frames import WorkerStart
from engine.executor.rank import GROUP_NAME, MakeGroup, MakeSocketGroup, named
from engine.executor.ranks import Parts, rank_config
from engine.executor.remote_worker import RemoteWorker
from engine.executor.worker_link import Handle
from engine.parallel.group_memory import SLOT_BYTES

if TYPE_CHECKING:
    from engine.parallel.group import Group, OwnGroup

Kind = Literal["agent", "frames", "sums"]
M = TypeVar("M", Hello, Spawned)
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

    def all_here(self) -> bool:
        """All ranks are on the driver's host, and may share its memory."""
        ...

    def cause_of(self, rank: int) -> str | None:
        """What is known of the loss of its agent; may wait for a second."""
        ...

    def close(self) -> None:
        """Nothing that was placed is left. Idempotent."""
        ...


class RemoteRanks:
    """`Ranks` that join by streams. On the driver's host they share memory, where it says so."""

    def __init__(self, config: EngineConfig, parts: Parts, places: Places) -> None:
        self._config, self._size = config, config.parallel.ranks
        self._parts, self._places = parts, places
        self._timeout_s = config.parallel.timeout_s
        self._cache_dir = Path(config.compile.cache_dir)
        self._held = ExitStack()
        self._memory: int | None = None
        self._sums: dict[int, socket] = {}
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
            agents = {
                rank: AgentStream(s) for (_, rank), s in self._streams(("agent",), ranks, deadline, unused).items()
            }
            hellos = {rank: self._told(Hello, rank, agent, deadline) for rank, agent in agents.items()}
            for rank, hello in hellos.items():
                if hello.version != VERSION:
                    raise EngineError(f"rank {rank} runs another version of the engine, at {hello.address[0]}")
            self._hosts += [hellos[rank].host for rank in ranks]
            memory = self._share() if self._places.all_here() else None
            peers = () if memory else (self._address, *(hellos[rank].address for rank in ranks))
            make_group = self._parts.make_group if memory else self._parts.make_socket_group
            for start in starts:
                start = msgspec.structs.replace(start, config=self.config_of(start.rank), make_group=make_group)
                agents[start.rank].tell(Spawn(start, peers, memory))
            kinds: tuple[Kind, ...] = ("frames",) if memory else ("frames", "sums")
            streams = self._streams(kinds, ranks, deadline, unused, agents)
            pids = {rank: self._told(Spawned, rank, agents[rank], deadline).pid for rank in ranks}
            self._sums = {rank: stream for (kind, rank), stream in streams.items() if kind == "sums"}
            unused.pop_all()
        self._listener.close()
        for rank in ranks:
            where = f"process {pids[rank]} on {hellos[rank].address[0]}"
            yield RemoteWorker(rank, pids[rank], where, agents[rank], streams["frames", rank], self._places.cause_of)

    def config_of(self, rank: int) -> EngineConfig:
        return self._config if self._memory is None else rank_config(self._config, rank)

    def join(self) -> OwnGroup:
        if self._memory is not None:
            make_group = cast(MakeGroup, named(self._parts.make_group))
            return make_group(self._memory, GROUP_NAME, 0, self._size, self._cache_dir)
        sockets = [self._sums[rank].fileno() if rank else -1 for rank in range(self._size)]
        make_socket_group = cast(MakeSocketGroup, named(self._parts.make_socket_group))
        group = make_socket_group(sockets, GROUP_NAME, 0, self._cache_dir)
        for stream in self._sums.values():
            stream.detach()  # they are the group's
        self._sums = {}
        return group

    def placed(self, group: Group) -> Group:
        return group

    def hosts(self) -> list[str]:
        return self._hosts

    def abort(self, reason: str) -> None:
        """There is nothing but collectives."""

    def close(self) -> None:
        for stream in self._sums.values():
            stream.close()
        self._sums = {}
        self._held.close()
        if self._memory is not None:
            os.close(self._memory)
            self._memory = None

    def _share(self) -> tuple[int, int]:
        """(this process, its descriptor) of memory for all ranks."""
        allocate = cast(Callable[[int, int], int], named(self._parts.allocate))
        self._memory = allocate(self._size, SLOT_BYTES)
        return os.getpid(), self._memory

    def _streams(
        self,
        kinds: Sequence[Kind],
        ranks: Sequence[int],
        deadline: float,
        held: ExitStack,
        agents: Mapping[int, AgentStream] | None = None,
    ) -> dict[tuple[Kind, int], socket]:
        """One of each kind of each rank, which `held` closes. Raises `EngineError`, also where an agent gives up."""
        missing = {(kind, rank) for kind in kinds for rank in ranks}
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
