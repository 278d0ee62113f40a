"""What of a machine each of several replicas gets."""

from __future__ import annotations

import msgspec

from engine.config import EngineConfig
from engine.executor.cores import share_of_cores


def replica_config(config: EngineConfig, place: int) -> EngineConfig:
    """`config` as one replica needs it: its own GPUs, and the ports that its place has. Those that come later take the
    places of earlier ones."""
    if config.parallel.data == 1:
        return config
    device = config.device
    if device.kind == "cuda":
        device = msgspec.structs.replace(device, index=place % config.parallel.data * config.parallel.ranks)
    cache = msgspec.structs.replace(config.cache, tell_front_end=config.cache.enable_prefix_caching)
    parallel = msgspec.structs.replace(config.parallel, data_rank=place)
    return msgspec.structs.replace(config, device=device, cache=cache, parallel=parallel)


def replica_cpus(config: EngineConfig, place: int) -> tuple[int, ...] | None:
    """The logical CPUs that a replica may run on, where there is exactly a physical core for each compute thread of
    all; None: any of them."""
    if config.device.kind == "cuda" or config.parallel.data == 1:
        return None
    parallel = config.parallel
    return share_of_cores(place % parallel.data, parallel.data, parallel.ranks * config.device.threads)
