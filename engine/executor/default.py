"""The executor that a configuration asks for."""

from __future__ import annotations

from engine.config import EngineConfig
from engine.executor.inline import local_executor
from engine.executor.interface import Executor
from engine.executor.multiproc import MultiprocExecutor


def make_executor(config: EngineConfig) -> Executor:
    """In this process what one rank computes; with processes of their own for the other ranks what several do, which
    this process starts, a Ray cluster or torchrun."""
    if config.parallel.ranks == 1:
        return local_executor(config)
    if config.parallel.backend == "ray":
        from engine.executor.ray_places import ray_ranks

        return MultiprocExecutor(config, make_ranks=ray_ranks)
    if config.parallel.backend == "external_launcher":
        from engine.executor.torchrun import torchrun_ranks

        return MultiprocExecutor(config, make_ranks=torchrun_ranks)
    return MultiprocExecutor(config)
