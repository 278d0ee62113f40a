"""From settings to what ranks divide among them."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import product
from typing import TYPE_CHECKING

import msgspec

from engine.config import EngineArgs, EngineConfig
from engine.errors import ConfigError, UnsupportedModelError
from engine.given_settings import read_setting
from engine.models.placement import ExpertPlacement, read_placement
from engine.models.sharding import Shard, check_divided, check_experts_divided, sharded
from engine.models.stages import Stage, check_stages, part_of
from engine.parallel_config import JOIN_TIMEOUT_S, EplbConfig, ParallelConfig, launch_of

if TYPE_CHECKING:
    from engine.machine import Machine
    from engine.models.description import ModelDescription
    from engine.models.facts import ModelFacts
    from engine.models.spec import DecoderSpec


def parallel_of(args: EngineArgs, model: ModelDescription, machine: Machine) -> ParallelConfig:
    """Raises ConfigError or UnsupportedModelError where the model cannot be divided so."""
    experts = ExpertPlacement() if args.enable_expert_parallel else None
    _check(args, model, experts)
    check_stages(model.spec, args.pipeline_parallel_size)
    if args.decode_context_parallel_size > 1 and not model.facts.keeps_kv:
        raise UnsupportedModelError("decode_context_parallel_size: an encoder keeps no keys and values to divide")
    backend = args.distributed_executor_backend
    is_launched = backend == "external_launcher" and machine.launcher
    return ParallelConfig(
        tensor=args.tensor_parallel_size,
        pipeline=args.pipeline_parallel_size,
        data=args.data_parallel_size,
        context=args.decode_context_parallel_size,
        experts=experts,
        eplb=eplb_of(args),
        backend="mp" if backend == "uni" else backend,
        launch=launch_of(machine.launcher) if is_launched else None,
        ray_placement=args.ray_placement_strategy or "PACK",
        timeout_s=JOIN_TIMEOUT_S if args.distributed_timeout_seconds is None else args.distributed_timeout_seconds,
    )


def eplb_of(args: EngineArgs) -> EplbConfig | None:
    """Raises ConfigError naming the field."""
    if not args.enable_eplb:
        if args.eplb_config:
            raise ConfigError("eplb_config says when experts move, which they do with enable_eplb: set that, too")
        return None
    if not args.enable_expert_parallel or args.data_parallel_size == 1:
        raise ConfigError(
            "enable_eplb: experts move between the replicas of data_parallel_size with enable_expert_parallel, and "
            "nowhere else; set both, or leave it out"
        )
    config = read_setting("eplb_config", args.eplb_config, EplbConfig)
    if config.num_redundant_experts:
        raise ConfigError(
            f"eplb_config: num_redundant_experts ({config.num_redundant_experts}): each expert is in one replica; "
            "leave it out"
        )
    if config.window_size > config.step_interval:
        raise ConfigError(
            f"eplb_config: window_size ({config.window_size}) must be in [1, step_interval], and step_interval is "
            f"{config.step_interval}"
        )
    return config


def check_model(config: EngineConfig, model: ModelDescription) -> None:
    """Raises ConfigError or UnsupportedModelError for what the model's layers, or the library's module where that
    computes it, cannot be asked."""
    if model.facts.states:
        _refuse_asked(config, f"layers of {model.facts.family} keep states", _STATES)
    if model.facts.keeps_latents:
        instead = ", or with model_impl='transformers', which keeps keys and values in their place"
        _refuse_asked(config, f"layers of {model.facts.family} keep latents", _LATENTS, instead)
    if model.spec is not None or config.parallel.tensor == 1:
        return
    from engine.models.fallback.division import check_library_divided

    if config.device.kind != "cpu":
        raise UnsupportedModelError(
            "tensor_parallel_size: of a model that runs through the library only CPUs compute parts"
        )
    check_library_divided(model.path, config.parallel.tensor)


_STATES = ("decode_context_parallel_size", "kv_transfer_config")
_LATENTS = ("kv_cache_dtype", "decode_context_parallel_size")


def _refuse_asked(config: EngineConfig, what: str, names: Sequence[str], instead: str = "") -> None:
    asked = {
        "decode_context_parallel_size": config.parallel.context > 1,
        "kv_transfer_config": config.kv_transfer is not None,
        "kv_cache_dtype": config.cache.dtype != config.model.dtype,
    }
    for name in names:
        if asked[name]:
            raise UnsupportedModelError(f"{name}: {what}, which are served without it yet{instead}")


def placed(config: EngineConfig, args: EngineArgs, model: ModelDescription) -> EngineConfig:
    """With experts where the file says, if there is one. Raises ConfigError."""
    if args.expert_placement is None:
        return config
    try:
        experts = read_placement(args.expert_placement)
    except ConfigError as error:
        raise ConfigError(f"expert_placement: {error}") from error
    parallel = msgspec.structs.replace(config.parallel, experts=experts)
    _check(args, model, experts)
    return msgspec.structs.replace(config, parallel=parallel)


def crowded(config: EngineConfig, machine: Machine) -> str | None:
    """What to tell a user whose compute threads are more than the cores of a host that has all of them; None: they are
    not."""
    parallel, threads = config.parallel, config.device.threads
    all_threads = threads * parallel.ranks * parallel.data
    if config.device.kind != "cpu" or parallel.backend != "mp" or all_threads <= machine.physical_cores:
        return None
    return (
        f"threads ({threads}) of each of {parallel.ranks} ranks and {parallel.data} replicas are {all_threads} compute "
        f"threads for {machine.physical_cores} cores, and wait for each other: lower --threads, or the number of ranks"
    )


def rank_specs(spec: DecoderSpec, config: EngineConfig) -> list[tuple[Stage, int, DecoderSpec]]:
    """Of one replica (its stage, its part, what it computes), stage by stage. Raises what `part_of` raises."""
    parallel = config.parallel
    found = []
    for index, part in product(range(parallel.pipeline), range(parallel.tensor)):
        stage = Stage(index, parallel.pipeline)
        shard = None if parallel.tensor == 1 else Shard(part, parallel.tensor, parallel.experts)
        found.append((stage, part, part_of(spec, shard, None if parallel.pipeline == 1 else stage)))
    return found


def held_by_one(spec: DecoderSpec, args: EngineArgs) -> DecoderSpec:
    """What one of several replicas holds: all, or all but the others' experts."""
    if not args.enable_expert_parallel or args.data_parallel_size == 1:
        return spec
    return sharded(spec, Shard(0, args.data_parallel_size, ExpertPlacement(), only_experts=True))


def facts_of_one(model: ModelDescription, args: EngineArgs) -> ModelFacts:
    """The same as facts."""
    held = None if model.spec is None else held_by_one(model.spec, args)
    return model.facts if held is None or held is model.spec else held.facts


def _check(args: EngineArgs, model: ModelDescription, experts: ExpertPlacement | None) -> None:
    if experts is not None and args.data_parallel_size > 1:
        check_experts_divided(model.spec, args.data_parallel_size, experts)
    else:
        check_divided(model.spec, args.tensor_parallel_size, experts)
