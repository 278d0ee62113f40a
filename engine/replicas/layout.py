"""What of a machine each of several replicas gets."""

from __future__ import annotations

import msgspec

from engine.config import EngineConfig
from engine.executor.cores import share_of_cores


def replica_config(config: EngineConfig, number: int) -> EngineConfig:
    """`config` as one replica needs it, which knows of no other: its GPU, or its share of this machine's memory, as far
    as nothing was said of that. Replicas that come later take the places of earlier ones."""
    size, device, cache = config.parallel.data, config.device, config.cache
    if device.kind == "cuda":
        device = msgspec.structs.replace(device, index=number % size)
    else:
        cache = msgspec.structs.replace(cache, memory_fraction=cache.memory_fraction / size)
    return msgspec.structs.replace(
        config,
        device=device,
        cache=msgspec.structs.replace(cache, tell_front_end=True),
        parallel=msgspec.structs.replace(config.parallel, data=1),
    )


def replica_cpus(config: EngineConfig, number: int) -> tuple[int, ...] | None:
    """The logical CPUs that a replica may run on, where there is exactly a physical core for each compute thread of
    all; None: any of them."""
    if config.device.kind == "cuda":
        return None
    parallel = config.parallel
    return share_of_cores(number % parallel.data, parallel.data, parallel.tensor * config.device.threads)
