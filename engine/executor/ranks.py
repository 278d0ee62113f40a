"""Where the other ranks run, and what joins them: processes of this one, or ranks that others place (`places`)."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Protocol, cast

import msgspec

from engine.config import EngineConfig
from engine.executor.cores import share_of_cores
from engine.executor.frames import WorkerStart
from engine.executor.rank import GROUP_NAME, STAGES_NAME, MakeGroup, named, stage_group
from engine.executor.worker_handle import WorkerHandle
from engine.executor.worker_link import Handle
from engine.kv_transfer.rank_caches import share
from engine.parallel.stage_group import place_of_rank
from engine.parallel.stage_link import StageLinks

if TYPE_CHECKING:
    from collections.abc import Callable

    from engine.parallel.group import Group, OwnGroup
from engine.parallel.group_memory import SLOT_BYTES


class Parts(msgspec.Struct, frozen=True):
    """What a group is made of, by name ("module:callable"), so that workers find it, too."""

    executor: str = "engine.executor.rank_executor:rank_executor"
    """`rank.MakeExecutor`: what each rank computes with"""
    allocate: str = "engine.parallel.shared_memory:allocate"
    """called with (ranks, slot bytes); the descriptor of what ranks of one host share"""
    make_group: str = "engine.parallel.shared_memory:SharedGroup"
    """`rank.MakeGroup`: of those"""
    make_socket_group: str = "engine.parallel.socket_group:SocketGroup"
    """`rank.MakeSocketGroup`: of ranks that share none"""
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

    def placed(self, group: Group) -> Group:
        """The same as rank 0's executor sees it."""
        ...

    def hosts(self) -> list[str]:
        """By rank, which machine each is on: those of one share its memory."""
        ...

    def abort(self, reason: str) -> None:
        """From any thread: whoever waits for another rank otherwise than in a collective is woken."""
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
        self._own_parts: OwnGroup | None = None
        self.caches = [share() for _ in range(1, self._size)] if config.kv_transfer is not None else []

    def start(self, starts: Sequence[WorkerStart]) -> Iterator[Handle]:
        assert self._memory is not None
        for start in starts:
            before, after = self._ends(start.rank)
            of_stage = self._of_stages[start.rank // self._tensor] if self._of_stages else -1
            start = msgspec.structs.replace(
                start,
                config=self.config_of(start.rank),
                group_fd=self._memory,
                parts_fd=of_stage,
                before=before,
                after=after,
            )
            shared = (self._memory,) if of_stage < 0 else (self._memory, of_stage)
            pages_fd = start.config.cache.pages_fd
            pages = () if pages_fd is None else (pages_fd,)
            yield WorkerHandle(start, (*shared, *pages, *(before or ()), *(after or ())))

    def config_of(self, rank: int) -> EngineConfig:
        config = rank_config(self._config, rank)
        if not rank or not self.caches:
            return config
        cache = msgspec.structs.replace(config.cache, pages_fd=self.caches[rank - 1])
        return msgspec.structs.replace(config, cache=cache)

    def join(self) -> OwnGroup:
        assert self._memory is not None
        make_group = cast(MakeGroup, named(self._parts.make_group))
        group = make_group(self._memory, group_name(self._config), 0, self._size, self._cache_dir)
        if self._of_stages:
            self._own_parts = make_group(self._of_stages[0], GROUP_NAME, 0, self._tensor, self._cache_dir)
        self._close_memory()
        return group

    def placed(self, group: Group) -> Group:
        return stage_group(self._config, 0, group, self._own_parts, *self._ends(0)) if self._links else group

    def hosts(self) -> list[str]:
        return ["here"] * self._size

    def abort(self, reason: str) -> None:
        for links in self._links:
            links.abort()
        if self._own_parts is not None:
            abort = cast("Callable[[int, str, Path], None]", named(self._parts.abort))
            for memory in self._of_stages:
                abort(memory, reason, self._cache_dir)

    def close(self) -> None:
        self._close_memory()
        for memory in self._of_stages:
            os.close(memory)
        self._of_stages = []
        if self._own_parts is not None:
            self._own_parts.close()
            self._own_parts = None
        for memory in self.caches:
            os.close(memory)
        self.caches = []
        for links in self._links:
            links.close()
        self._links = []

    def _ends(self, rank: int) -> tuple[tuple[int, int] | None, tuple[int, int] | None]:
        """Of the links to the stages before and behind."""
        if not self._links:
            return None, None
        stage, part = place_of_rank(rank, self._stages, self._tensor)
        return self._links[part].before(stage.index), self._links[part].after(stage.index)

    def _close_memory(self) -> None:
        if self._memory is not None:
            os.close(self._memory)
            self._memory = None


def group_name(config: EngineConfig) -> str:
    """Of the group of all ranks."""
    return GROUP_NAME if config.parallel.pipeline == 1 else STAGES_NAME


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
