"""The executor that a configuration asks for."""

from __future__ import annotations

from engine.config import EngineConfig
from engine.executor.inline import local_executor
from engine.executor.interface import Executor
from engine.executor.multiproc import MultiprocExecutor


def make_executor(config: EngineConfig) -> Executor:
    """In this process what one rank computes; with processes of their own for the other ranks what several do."""
    return MultiprocExecutor(config) if config.parallel.ranks > 1 else local_executor(config)
