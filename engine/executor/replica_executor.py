"""What a replica computes with that has some of a model's experts: the others have the rest."""

from __future__ import annotations

import json
import logging
import os
from collections.abc import Callable
from pathlib import Path

from engine.config import EngineConfig
from engine.executor.in_process import InProcessExecutor
from engine.executor.inline import local_executor
from engine.models.expert_exchange import ExpertExchange
from engine.parallel.group import Group
from engine.parallel.shared_memory import SharedGroup
from engine.runner.loading import RunnerParts, load_parts
from engine.runner.model_runner import ModelRunner

logger = logging.getLogger(__name__)

GROUP_NAME = "replicas"


def replica_executor(config: EngineConfig, group_fd: int) -> InProcessExecutor:
    """`group_fd`: of what the replicas share; it is closed here. When the executor is closed, whoever waits for this
    replica in a step is told."""
    parallel, cache_dir = config.parallel, Path(config.compile.cache_dir)
    try:
        group = SharedGroup(group_fd, GROUP_NAME, parallel.data_rank, parallel.data, cache_dir)
    finally:
        os.close(group_fd)

    def leave() -> None:
        group.abort(f"replica {parallel.data_rank} has been closed")

    return executor_of(config, group, leave)


def executor_of(config: EngineConfig, replicas: Group, leave: Callable[[], None]) -> InProcessExecutor:
    """Of any transport. As it is closed, it calls `leave`, and tells the log how many tokens each expert was given."""
    exchanges: list[ExpertExchange] = []

    def load_runner(config: EngineConfig) -> ModelRunner:
        return ModelRunner.load(config, load)

    def load(config: EngineConfig) -> RunnerParts:
        parts = load_parts(config, replicas=replicas)
        if parts.exchange is not None:
            exchanges.append(parts.exchange)
        return parts

    def tell_and_leave() -> None:
        leave()
        for exchange in exchanges:  # tools/place_experts.py reads it
            logger.info("expert loads of replica %d: %s", replicas.rank, json.dumps(exchange.loads()))

    return local_executor(config, load_runner, tell_and_leave)
