"""Ranks that torchrun starts, or whoever sets its variables: the same program once for each rank.

Rank 0 schedules, computes and serves. The others find its address in torchrun's store, are agents until it leaves, and
come back with the status to exit with.
"""

from __future__ import annotations

from collections.abc import Sequence
from datetime import timedelta
from ipaddress import ip_address
from typing import Any

import msgspec

from engine.config import EngineConfig
from engine.errors import ConfigError, EngineError
from engine.executor.agent import AgentTask, serve_rank
from engine.executor.connections import Address, own_host
from engine.executor.ranks import Parts
from engine.executor.remote_ranks import RemoteRanks
from engine.parallel_config import Launch, launch_of


def serve_as_rank(launch: Launch, ranks: int, timeout_s: float) -> int | None:
    """In every process that torchrun has started: None in that of rank 0, which goes on; the others are ranks until
    rank 0 leaves, and get the status to exit with. Raises `EngineError`."""
    _check_size(launch, ranks)
    if launch.rank == 0:
        return None
    try:
        told = _store(launch, timeout_s).get(launch.key)
    except RuntimeError as error:  # torch's, of several kinds
        raise EngineError(
            f"rank {launch.rank}: rank 0 did not say within {timeout_s:g} s where it is: {str(error).splitlines()[0]}"
        ) from None
    task = msgspec.json.decode(told, type=AgentTask)
    return 0 if serve_rank(msgspec.structs.replace(task, rank=launch.rank, node=launch.node)).is_orderly else 1


def torchrun_ranks(config: EngineConfig, parts: Parts) -> RemoteRanks:
    """For `MultiprocExecutor`, in rank 0's process or a child of it."""
    launch = config.parallel.launch or launch_of({})
    _check_size(launch, config.parallel.ranks)
    return RemoteRanks(config, parts, TorchrunPlaces(launch))


class TorchrunPlaces:
    """See `remote_ranks.Places`: the agents are there, and are told where to come."""

    def __init__(self, launch: Launch) -> None:
        self._launch = launch
        self._store: Any = None

    def host(self) -> str:
        """Raises `ConfigError` where ranks on other nodes would be told an address that leads to themselves."""
        host, name = own_host(self._launch.master), self._launch.master[0]
        if ip_address(host).is_loopback and (self._launch.local_size or self._launch.size) < self._launch.size:
            raise ConfigError(
                f"MASTER_ADDR {name} is {host} on this host, where other nodes do not reach it (as in many an "
                "/etc/hosts): give torchrun an address of the network as --master-addr, on each node the same"
            )
        return host

    def place(self, ranks: Sequence[int], driver: Address, secret: bytes, timeout_s: float) -> None:
        self._store = _store(self._launch, timeout_s)
        task = AgentTask(0, driver, secret.hex(), timeout_s, node=self.node())
        self._store.set(self._launch.key, msgspec.json.encode(task).decode())

    def check(self) -> None:
        """torchrun ends all of them when one has failed."""

    def node(self) -> str:
        return self._launch.node

    def cause_of(self, rank: int) -> str | None:
        return None

    def close(self) -> None:
        self._store = None


def _check_size(launch: Launch, ranks: int) -> None:
    if launch.size != ranks:
        raise ConfigError(
            f"tensor_parallel_size times pipeline_parallel_size ({ranks}): torchrun has started {launch.size} "
            "processes; each is one rank"
        )


def _store(launch: Launch, timeout_s: float) -> Any:
    from torch import distributed

    host, port = launch.master
    is_master = launch.rank == 0 and not launch.has_store
    make: Any = distributed.TCPStore  # type: ignore[attr-defined]  # torch does not list it
    return make(host, port, None, is_master, timeout=timedelta(seconds=timeout_s), wait_for_workers=False)
