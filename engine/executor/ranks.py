"""Where the other ranks run, and what joins them: processes of this one, or ranks that others place (`places`)."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Protocol, cast

import msgspec

from engine.config import EngineConfig
from engine.executor.cores import share_of_cores
from engine.executor.frames import RankEnds, WorkerStart
from engine.executor.joining import join, named
from engine.executor.worker_handle import WorkerHandle
from engine.executor.worker_link import Handle
from engine.kv_transfer.rank_caches import share
from engine.parallel.stage_group import place_of_rank
from engine.parallel.stage_link import StageLinks

if TYPE_CHECKING:
    from collections.abc import Callable

    from engine.parallel.group import OwnGroup
from engine.parallel.group_memory import SLOT_BYTES


class Parts(msgspec.Struct, frozen=True):
    """What a group is made of, by name ("module:callable"), so that workers find it, too."""

    executor: str = "engine.executor.rank_executor:rank_executor"
    """`rank.MakeExecutor`: what each rank computes with"""
    allocate: str = "engine.parallel.shared_memory:allocate"
    """called with (ranks, slot bytes); the descriptor of what ranks of one host share"""
    make_group: str = "engine.parallel.shared_memory:SharedGroup"
    """`joining.MakeGroup`: of those"""
    make_socket_group: str = "engine.parallel.socket_group:SocketGroup"
    """`joining.MakeSocketGroup`: of ranks that share none"""
    abort: str = "engine.parallel.shared_memory:abort"
    """called with (that descriptor, reason, cache directory) by who is no rank of the group"""


class Ranks(Protocol):
    """All methods but `start` and `abort` are for the executor's thread."""

    caches: list[int]
    """what the others keep keys and values in, by rank from rank 1 on, where this process reads them; else empty"""

    def start(self, starts: Sequence[WorkerStart]) -> Iterator[Handle]:
        """`starts` of all ranks but the driver's, without descriptors and with the configuration of all ranks. Workers
        of this host die with the calling thread, or with their agent."""
        ...

    def config_of(self, rank: int) -> EngineConfig:
        """What that rank computes with; of rank 0 after `start`."""
        ...

    def join(self) -> OwnGroup:
        """The driver's own place in the group, after `start`."""
        ...

    def hosts(self) -> list[str]:
        """By rank, which machine each is on: those of one share its memory."""
        ...

    def abort(self, reason: str, is_lost: bool) -> None:
        """From any thread, once a rank is lost (`is_lost`) or the driver leaves: whoever waits for another rank in
        something else than a collective of the driver's own group does so no more."""
        ...

    def close(self) -> None:
        """After the workers have ended."""
        ...


class LocalRanks:
    """Processes that this one starts, which share memory with it."""

    def __init__(self, config: EngineConfig, parts: Parts) -> None:
        self._config, self._size, self._parts = config, config.parallel.ranks, parts
        self._cache_dir = Path(config.compile.cache_dir)
        self._stages, self._tensor = config.parallel.pipeline, config.parallel.tensor
        self._links = [StageLinks(self._stages) for _ in range(self._tensor)] if self._stages > 1 else []
        allocate = cast("Callable[[int, int], int]", named(parts.allocate))
        self._memory: int | None = allocate(self._size, SLOT_BYTES)
        several = self._stages > 1 and self._tensor > 1
        self._of_stages = [allocate(self._tensor, SLOT_BYTES) for _ in range(self._stages)] if several else []
        """kept open, so that every stage's parts can be woken"""
        self.caches = [share() for _ in range(1, self._size)] if config.kv_transfer is not None else []

    def start(self, starts: Sequence[WorkerStart]) -> Iterator[Handle]:
        for start in starts:
            ends, config = self._ends(start.rank), self.config_of(start.rank)
            pages = () if config.cache.pages_fd is None else (config.cache.pages_fd,)
            start = msgspec.structs.replace(start, config=config, ends=ends)
            yield WorkerHandle(start, (*ends.descriptors(), *pages))

    def config_of(self, rank: int) -> EngineConfig:
        config = rank_config(self._config, rank)
        if not rank or not self.caches:
            return config
        cache = msgspec.structs.replace(config.cache, pages_fd=self.caches[rank - 1])
        return msgspec.structs.replace(config, cache=cache)

    def join(self) -> OwnGroup:
        group = join(self._config, 0, self._ends(0), self._parts)
        self._close_memory()
        return group

    def hosts(self) -> list[str]:
        return ["here"] * self._size

    def abort(self, reason: str, is_lost: bool) -> None:
        for links in self._links:
            links.abort()
        for memory in self._of_stages if self._memory is None else []:  # before all have joined, nobody waits there
            abort = cast("Callable[[int, str, Path], None]", named(self._parts.abort))
            abort(memory, reason, self._cache_dir)

    def close(self) -> None:
        self._close_memory()
        for memory in self._of_stages:
            os.close(memory)
        self._of_stages = []
        for memory in self.caches:
            os.close(memory)
        self.caches = []
        for links in self._links:
            links.close()
        self._links = []

    def _ends(self, rank: int) -> RankEnds:
        assert self._memory is not None
        if not self._links:
            return RankEnds(memory=self._memory)
        stage, part = place_of_rank(rank, self._stages, self._tensor)
        return RankEnds(
            memory=self._memory,
            parts_memory=self._of_stages[rank // self._tensor] if self._of_stages else -1,
            before=self._links[part].before(stage.index),
            after=self._links[part].after(stage.index),
        )

    def _close_memory(self) -> None:
        if self._memory is not None:
            os.close(self._memory)
            self._memory = None


def parts_for(config: EngineConfig) -> Parts:
    """What carries the collectives of ranks that compute on such a device."""
    if config.device.kind == "cuda":
        group = "engine.parallel.device_group"
        return Parts(allocate=f"{group}:allocate", make_group=f"{group}:nccl_group")
    return Parts()


def rank_config(config: EngineConfig, rank: int) -> EngineConfig:
    """`config` as one rank needs it: its GPU, or its share of this host's cores."""
    device = config.device
    if device.kind == "cuda":
        device = msgspec.structs.replace(device, index=device.index + rank)
    else:
        cores = share_of_cores(rank, config.parallel.ranks, device.threads)
        device = msgspec.structs.replace(device, cores=cores)
    return msgspec.structs.replace(config, device=device)
