"""Which client an engine needs."""

from __future__ import annotations

from engine.config import EngineConfig
from engine.core.client import CoreClient, InProcessClient, ProcessClient
from engine.replicas.client import ReplicatedClient


def local_client(config: EngineConfig) -> CoreClient:
    """A core in this process where there is one; several ones have a process each."""
    return InProcessClient(config) if config.parallel.data == 1 else ReplicatedClient(config)


def process_client(config: EngineConfig) -> CoreClient:
    """A core in a process of its own, which another one follows when it dies, or several ones."""
    alone = config.parallel.data == 1 and not config.core_restarts
    return ProcessClient(config) if alone else ReplicatedClient(config)
