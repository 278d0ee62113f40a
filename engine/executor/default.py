"""The executor that a configuration asks for."""

from __future__ import annotations

from engine.config import EngineConfig
from engine.executor.inline import local_executor
from engine.executor.interface import Executor
from engine.executor.multiproc import MultiprocExecutor
from engine.executor.replica_executor import replica_executor


def make_executor(config: EngineConfig, group_fd: int | None = None) -> Executor:
    """In this process what one rank computes; with processes of their own for the other ranks what several do, which
    this process starts, a Ray cluster or torchrun. `group_fd`: of the memory that replicas share over which experts
    are divided."""
    if group_fd is not None:
        return replica_executor(config, group_fd)
    if config.parallel.ranks == 1:
        return local_executor(config)
    if config.parallel.backend == "ray":
        from engine.executor.ray_places import ray_ranks

        return MultiprocExecutor(config, make_ranks=ray_ranks)
    if config.parallel.backend == "external_launcher":
        from engine.executor.torchrun import torchrun_ranks

        return MultiprocExecutor(config, make_ranks=torchrun_ranks)
    return MultiprocExecutor(config)
