"""Ranks that torchrun starts, or whoever sets its variables: the same program once for each rank.

Rank 0 schedules, computes and serves. The others find its address in torchrun's store, are agents until it leaves, and
come back with the status to exit with.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from datetime import timedelta
from typing import Any

import msgspec

from engine.config import EngineConfig
from engine.errors import ConfigError, EngineError
from engine.executor.agent import AgentTask, serve_rank
from engine.executor.connections import Address, own_host
from engine.executor.ranks import Parts
from engine.executor.remote_ranks import RemoteRanks


class Launch(msgspec.Struct, frozen=True):
    """What torchrun says to each of its processes."""

    rank: int
    size: int
    local_size: int
    master: Address
    has_store: bool
    """torchrun's own, at `master`; else rank 0 is to open it"""
    restarts: int

    @property
    def key(self) -> str:
        """Under which rank 0 says where it is."""
        return f"pageloom/{self.restarts}/driver"


def launch_of(environment: Mapping[str, str]) -> Launch:
    """Raises `ConfigError` where it was not torchrun that started this process."""
    names = ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
    if missing := [name for name in names if name not in environment]:
        raise ConfigError(
            "distributed_executor_backend='external_launcher' is for programs that torchrun starts: "
            f"{', '.join(missing)} is not set"
        )
    try:
        rank, size, port = (int(environment[name]) for name in ("RANK", "WORLD_SIZE", "MASTER_PORT"))
        local_size, restarts = (
            int(environment.get(name, default))
            for name, default in (("LOCAL_WORLD_SIZE", "0"), ("TORCHELASTIC_RESTART_COUNT", "0"))
        )
    except ValueError as error:
        raise ConfigError(f"torchrun's variables (RANK, WORLD_SIZE, MASTER_PORT ...) are no numbers: {error}") from None
    has_store = environment.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
    return Launch(rank, size, local_size, (environment["MASTER_ADDR"], port), has_store, restarts)


def serve_as_rank(ranks: int, timeout_s: float, environment: Mapping[str, str] = os.environ) -> int | None:
    """In every process that torchrun has started: None in that of rank 0, which goes on; the others are ranks until
    rank 0 leaves, and get the status to exit with. Raises `EngineError`."""
    launch = launch_of(environment)
    _check_size(launch, ranks)
    if launch.rank == 0:
        return None
    try:
        told = _store(launch, timeout_s).get(launch.key)
    except RuntimeError as error:  # torch's, of several kinds
        raise EngineError(
            f"rank {launch.rank}: rank 0 did not say within {timeout_s:g} s where it is: {str(error).splitlines()[0]}"
        ) from None
    task = msgspec.structs.replace(msgspec.json.decode(told, type=AgentTask), rank=launch.rank)
    return 0 if serve_rank(task).is_orderly else 1


def torchrun_ranks(config: EngineConfig, parts: Parts) -> RemoteRanks:
    """For `MultiprocExecutor`, in rank 0's process or a child of it."""
    launch = launch_of(os.environ)
    _check_size(launch, config.parallel.ranks)
    return RemoteRanks(config, parts, TorchrunPlaces(launch))


class TorchrunPlaces:
    """See `remote_ranks.Places`: the agents are there, and are told where to come."""

    def __init__(self, launch: Launch) -> None:
        self._launch = launch
        self._store: Any = None

    def host(self) -> str:
        return own_host(self._launch.master)

    def place(self, ranks: Sequence[int], driver: Address, secret: bytes, timeout_s: float) -> None:
        self._store = _store(self._launch, timeout_s)
        task = AgentTask(rank=0, driver=driver, secret=secret.hex(), timeout_s=timeout_s)
        self._store.set(self._launch.key, msgspec.json.encode(task).decode())

    def check(self) -> None:
        """torchrun ends all of them when one has failed."""

    def all_here(self) -> bool:
        return self._launch.local_size == self._launch.size

    def cause_of(self, rank: int) -> str | None:
        return None

    def close(self) -> None:
        self._store = None


def _check_size(launch: Launch, ranks: int) -> None:
    if launch.size != ranks:
        raise ConfigError(
            f"tensor_parallel_size ({ranks}): torchrun has started {launch.size} processes; each is one rank"
        )


def _store(launch: Launch, timeout_s: float) -> Any:
    from torch import distributed

    host, port = launch.master
    is_master = launch.rank == 0 and not launch.has_store
    make: Any = distributed.TCPStore  # type: ignore[attr-defined]  # torch does not list it
    return make(host, port, None, is_master, timeout=timedelta(seconds=timeout_s), wait_for_workers=False)
