"""What can be said of settings without a model: checked before anything is fetched or loaded (`resolve_here`,
`plan_of`), and by `resolve` itself."""

from __future__ import annotations

import re
from typing import Literal

from engine.config import EngineArgs, GraphMode
from engine.errors import ConfigError
from engine.given_settings import read_setting
from engine.kv_settings import KVEventsConfig, KVTransferConfig
from engine.kv_transfer.sources import Sources, check_address
from engine.limits import MAX_RANKS, MAX_REPLICAS, MOST
from engine.machine import Machine
from engine.models.generation import overridden
from engine.sizes import setting_bytes

Kind = Literal["cpu", "cuda"]

_ENDPOINT = re.compile(r"tcp://\S+:[0-9]{1,5}|ipc://.+")
_LANDING_BYTES = 1 << 30
"""of the host tier, where pages of other engines come in, unless `swap_space` says"""
_MAX_PORT = 65535
_BLOCK_SIZES = (8, 16, 32, 64, 128, 256)


def check_settings(args: EngineArgs, machine: Machine) -> Kind:
    """Returns the device. Raises `ConfigError` naming the setting."""
    kind = _device(args, machine)
    _check_ranges(args)
    overridden({}, args.override_generation_config)
    kv_events_of(args)
    transfer = kv_transfer_of(args, kind)
    if transfer is not None:
        check_address(transfer.kv_ip)
        Sources(transfer.kv_sources)
    return kind


def check_files(args: EngineArgs) -> None:
    """Raises `ConfigError`."""
    if args.chat_template is not None:
        from engine.frontend.given_template import given_template  # jinja2

        given_template(args.chat_template, args.limits)


def kv_cache_memory_of(args: EngineArgs) -> int | None:
    return None if args.kv_cache_memory is None else setting_bytes(args.kv_cache_memory, "kv_cache_memory")


def kv_events_of(args: EngineArgs) -> KVEventsConfig | None:
    """None: they are not to be published. Raises `ConfigError` naming the field."""
    config = read_setting("kv_events_config", args.kv_events_config, KVEventsConfig)
    for name in ("endpoint", "replay_endpoint"):
        endpoint = getattr(config, name)
        if endpoint is not None and not _ENDPOINT.fullmatch(endpoint):
            raise ConfigError(f"kv_events_config: {name} must be as tcp://*:5557 or ipc:///a/path, got {endpoint!r}")
    if not config.enable_kv_cache_events or config.publisher == "null":
        return None
    if args.enable_prefix_caching is False:
        raise ConfigError("kv_events_config tells of the prefix cache, and enable_prefix_caching is off: leave one out")
    check_ports(config, args.data_parallel_size)
    return config


def check_ports(config: KVEventsConfig, replicas: int) -> None:
    """Each replica adds its rank to both ports: there must be such ports, and they must not meet. Raises
    `ConfigError`."""
    for name in ("endpoint", "replay_endpoint"):
        endpoint = getattr(config, name) or ""
        if endpoint.startswith("tcp://") and not 1 <= int(endpoint.rpartition(":")[2]) <= _MAX_PORT + 1 - replicas:
            among = "" if replicas == 1 else f", and of data_parallel_size ({replicas}) each adds its rank"
            raise ConfigError(f"kv_events_config: {name} {endpoint!r}: ports are 1 to {_MAX_PORT}{among}")
    endpoints = [config.endpoint, config.replay_endpoint or ""]
    if not all(endpoint.startswith("tcp://") for endpoint in endpoints) or not re.search(r"\*|::", config.endpoint):
        return
    port, replay = (int(endpoint.rpartition(":")[2]) for endpoint in endpoints)
    if abs(port - replay) < replicas:
        raise ConfigError(
            f"kv_events_config: endpoint and replay_endpoint have ports {port} and {replay}, and each of "
            f"data_parallel_size ({replicas}) adds its rank: leave {replicas} between them"
        )


def kv_transfer_of(args: EngineArgs, kind: Kind) -> KVTransferConfig | None:
    """Raises `ConfigError` naming the field, and the setting that it does not go together with."""
    if not args.kv_transfer_config:
        return None
    config = read_setting("kv_transfer_config", args.kv_transfer_config, KVTransferConfig)
    if kind != "cpu":
        raise ConfigError("kv_transfer_config moves pages between CPUs so far: on a GPU it is not proven; leave it out")
    for name in ("pipeline_parallel_size", "decode_context_parallel_size"):
        if getattr(args, name) > 1:
            raise ConfigError(f"kv_transfer_config does not go together with {name} above 1 so far: leave one out")
    if args.distributed_executor_backend in ("ray", "external_launcher"):
        raise ConfigError(
            "kv_transfer_config: rank 0 reads the pages of ranks that it has started on its own host; leave out "
            "distributed_executor_backend"
        )
    if args.enable_expert_parallel and args.data_parallel_size > 1:
        raise ConfigError(
            "kv_transfer_config: replicas with enable_expert_parallel move no pages so far: leave one out"
        )
    check_transfer_port(config, args.data_parallel_size)
    if args.enable_prefix_caching is False:
        raise ConfigError("kv_transfer_config needs the prefix cache, and enable_prefix_caching is off: leave one out")
    return config


def check_transfer_port(config: KVTransferConfig, replicas: int) -> None:
    """Each replica adds its rank: there must be such ports. Raises `ConfigError`."""
    if (most := _MAX_PORT + 1 - replicas) < config.kv_port:
        raise ConfigError(
            f"kv_transfer_config: kv_port must be at most {most}, for each of data_parallel_size ({replicas}) adds its "
            f"rank; got {config.kv_port}"
        )


def swap_space_of(args: EngineArgs, kind: Kind, machine: Machine) -> int:
    """Bytes of the host tier. Raises `ConfigError`."""
    transfer = kv_transfer_of(args, kind)
    lands = transfer is not None and transfer.consumes
    if args.swap_space is None:
        swap_space = min(_LANDING_BYTES, machine.memory_bytes // 16 // args.data_parallel_size) if lands else 0
    else:
        swap_space = setting_bytes(args.swap_space, "swap_space")
    if lands and not swap_space:
        raise ConfigError("swap_space (0): pages of other engines come into it (kv_transfer_config): leave it out")
    if swap_space < 0:
        raise ConfigError(f"swap_space must be at least 0, got {swap_space}")
    most = machine.memory_bytes // args.data_parallel_size
    if swap_space > most:
        whose = "the machine's memory" if args.data_parallel_size == 1 else "a replica's share of the machine's memory"
        raise ConfigError(f"swap_space ({swap_space} bytes) exceeds {whose} ({most} bytes)")
    if args.preemption == "swap" and swap_space == 0:
        raise ConfigError("preemption='swap' needs swap_space: set --swap-space to the host memory to use, as 4GiB")
    return swap_space


def graphs_of(args: EngineArgs, kind: Kind) -> GraphMode:
    wanted = args.graphs if args.graphs is not None else "auto"
    if kind == "cpu":
        if wanted in ("auto", "none"):
            return "none"
        raise ConfigError(f"graphs={wanted!r} needs device='cuda': a CPU has no CUDA graphs; leave graphs out")
    if args.compile == "none" and wanted in ("piecewise", "both"):
        raise ConfigError(f"graphs={wanted!r} captures compiled pieces, but compile='none'; set compile='pieces'")
    return wanted


def batch_invariant_of(args: EngineArgs, kind: Kind, dtype: str) -> bool:
    """Raises `ConfigError` where sums are cut by the batch."""
    if not args.batch_invariant:
        return False
    if dtype != "bfloat16" and (kind == "cpu" or dtype != "float16"):
        allowed = "'bfloat16'" if kind == "cpu" else "'bfloat16' or 'float16'"
        raise ConfigError(
            f"batch_invariant needs dtype={allowed}, whose products are the engine's own; got {dtype!r}, and the "
            "library cuts sums by the batch"
        )
    if kind == "cuda" and args.enable_lora:
        raise ConfigError("batch_invariant on a GPU goes without adapters: their products are cut by the batch")
    if kind == "cuda" and args.compile == "none":
        raise ConfigError("batch_invariant on a GPU needs compile='pieces': the library's norms cut sums by the batch")
    if kind == "cuda" and (args.tensor_parallel_size > 1 or args.enable_expert_parallel):
        raise ConfigError(
            "batch_invariant on GPUs needs tensor_parallel_size=1 and no expert parallelism: NCCL adds the ranks' sums "
            "in an order that depends on their size"
        )
    return True


def debug_sync_of(args: EngineArgs, kind: Kind) -> bool:
    if args.debug_sync and kind == "cpu":
        raise ConfigError("debug_sync needs device='cuda': on a CPU nothing runs behind the host; leave debug_sync out")
    return args.debug_sync


def _device(args: EngineArgs, machine: Machine) -> Kind:
    if args.device == "auto":
        kind: Kind = "cuda" if machine.cuda else "cpu"
    else:
        kind = args.device
    if kind == "cuda" and not machine.cuda:
        why = f" ({machine.cuda_problem})" if machine.cuda_problem else ""
        raise ConfigError(f"device='cuda', but torch finds no CUDA device here{why}; set device='cpu' or 'auto'")
    _check_cores(args, machine)
    _check_ranks(args, kind)
    _check_replicas(args, kind, machine)
    if kind == "cuda" and args.cores is not None:
        raise ConfigError("cores binds the compute threads of device='cpu'; it has no effect on 'cuda': leave it out")
    if kind == "cuda" and args.threads is not None:
        raise ConfigError("threads sets the compute threads of device='cpu'; it has no effect on 'cuda': leave it out")
    return kind


def _check_ranks(args: EngineArgs, kind: Kind) -> None:
    for name in ("tensor_parallel_size", "pipeline_parallel_size"):
        ranks = getattr(args, name)
        if kind == "cuda" and ranks > 1 and name == "pipeline_parallel_size":
            raise ConfigError(f"{name} ({ranks}): stages compute on CPUs only; set device='cpu'")
        if ranks > MAX_RANKS:
            raise ConfigError(f"{name} must be at most {MAX_RANKS}, got {ranks}")
        if ranks > 1 and args.cores is not None:
            raise ConfigError(f"cores binds the threads of one rank, and {name} is {ranks}: leave it out")
    if (ranks := args.tensor_parallel_size * args.pipeline_parallel_size) > MAX_RANKS:
        raise ConfigError(f"tensor_parallel_size times pipeline_parallel_size must be at most {MAX_RANKS}, got {ranks}")
    if args.enable_expert_parallel:
        _check_experts(args, kind)
    if args.expert_placement is not None and not args.enable_expert_parallel:
        raise ConfigError("expert_placement is of whole experts: set enable_expert_parallel, too, or leave it out")
    if args.pipeline_parallel_size > 1:
        _check_stages(args)
    if args.decode_context_parallel_size > 1:
        _check_context(args, kind)
    check_launch(args)
    if kind == "cuda" and args.distributed_executor_backend in ("ray", "external_launcher"):
        raise ConfigError(
            f"distributed_executor_backend={args.distributed_executor_backend!r}: ranks on GPUs are processes of one "
            "host, since NCCL between hosts is unproven here; use 'mp', or device='cpu'"
        )


def check_launch(args: EngineArgs) -> None:
    """Of who starts the ranks. Raises `ConfigError`."""
    backend, ranks = args.distributed_executor_backend, args.tensor_parallel_size * args.pipeline_parallel_size
    if backend != "ray" and args.ray_placement_strategy is not None:
        raise ConfigError("ray_placement_strategy is of distributed_executor_backend='ray': set that, too")
    if backend == "uni" and ranks > 1:
        raise ConfigError(f"distributed_executor_backend='uni' is of one rank, and there are {ranks}: leave it out")
    if backend not in ("ray", "external_launcher"):
        if args.distributed_timeout_seconds is not None:
            raise ConfigError(
                "distributed_timeout_seconds is how long ranks of distributed_executor_backend='ray' or "
                "'external_launcher' may take to join: set that, too, or leave it out"
            )
        return
    name = f"distributed_executor_backend={backend!r}"
    if ranks == 1:
        raise ConfigError(
            f"{name} places ranks, and there is one: raise tensor_parallel_size or pipeline_parallel_size, or leave it "
            "out"
        )
    if args.data_parallel_size > 1:
        raise ConfigError(f"{name}: it places the ranks of one replica; use 'mp', or one engine for each replica")
    if args.distributed_timeout_seconds is not None and not 0 < args.distributed_timeout_seconds <= 86400:
        raise ConfigError(
            f"distributed_timeout_seconds must be in (0, 86400], got {args.distributed_timeout_seconds:g}"
        )


def _check_context(args: EngineArgs, kind: Kind) -> None:
    parts, name = args.decode_context_parallel_size, "decode_context_parallel_size"
    if parts != args.tensor_parallel_size:
        raise ConfigError(
            f"{name} ({parts}): all ranks of tensor_parallel_size ({args.tensor_parallel_size}) divide positions, or "
            "none does; set the same number, or 1"
        )
    if kind == "cuda":
        raise ConfigError(f"{name} ({parts}): keys and values are divided by positions on CPUs only; set device='cpu'")
    if args.pipeline_parallel_size > 1:
        raise ConfigError(f"{name} ({parts}): stages keep their own layers whole; leave out pipeline_parallel_size")


def _check_experts(args: EngineArgs, kind: Kind) -> None:
    replicas = args.data_parallel_size
    if args.tensor_parallel_size == replicas == 1:
        raise ConfigError(
            "enable_expert_parallel deals experts out to ranks or replicas, and tensor_parallel_size and "
            "data_parallel_size are 1: raise one of them, or drop this"
        )
    if replicas == 1:
        return
    for name in ("tensor_parallel_size", "pipeline_parallel_size"):
        if (ranks := getattr(args, name)) > 1:
            raise ConfigError(
                f"enable_expert_parallel deals experts out to the {replicas} replicas of data_parallel_size, of one "
                f"rank each, and {name} is {ranks}: leave one of the two out"
            )
    if kind == "cuda":
        raise ConfigError("enable_expert_parallel: replicas have each other's experts on CPUs only; set device='cpu'")


def _check_stages(args: EngineArgs) -> None:
    if args.async_scheduling:
        raise ConfigError("async_scheduling: stages have steps in flight without it; leave it out")


def _check_replicas(args: EngineArgs, kind: Kind, machine: Machine) -> None:
    replicas = args.data_parallel_size
    if replicas > MAX_REPLICAS:
        raise ConfigError(f"data_parallel_size must be at most {MAX_REPLICAS}, got {replicas}")
    if kind == "cuda" and (needed := replicas * args.tensor_parallel_size) > len(machine.cuda):
        raise ConfigError(
            f"data_parallel_size ({replicas}) and tensor_parallel_size ({args.tensor_parallel_size}): each rank "
            f"needs a GPU, which makes {needed}, and there are {len(machine.cuda)}"
        )
    if replicas > 1 and args.cores is not None:
        raise ConfigError(f"cores binds the threads of one replica, and data_parallel_size is {replicas}: leave it out")


def _check_cores(args: EngineArgs, machine: Machine) -> None:
    cores = args.cores
    if cores is None:
        return
    if not cores or min(cores) < 0 or len(set(cores)) != len(cores):
        raise ConfigError(f"cores must name logical CPUs, each once, for example 0,1; got {cores}")
    if machine.cpus and (foreign := set(cores) - machine.cpus):
        raise ConfigError(f"cores: this process may run on CPUs {sorted(machine.cpus)} only, not on {min(foreign)}")
    if args.threads is not None and args.threads > len(cores):
        raise ConfigError(
            f"threads ({args.threads}) exceeds the {len(cores)} cores: compute threads that share one wait for each "
            "other; lower threads or name more cores"
        )


def _check_ranges(args: EngineArgs) -> None:
    for name in (
        "max_model_len",
        "max_num_seqs",
        "max_num_batched_tokens",
        "max_mixed_prefill_tokens",
        "max_waiting",
        "threads",
        "kv_cache_memory",
        "tensor_parallel_size",
        "data_parallel_size",
        "pipeline_parallel_size",
        "decode_context_parallel_size",
    ):
        value = kv_cache_memory_of(args) if name == "kv_cache_memory" else getattr(args, name)
        if value is not None and value < 1:
            raise ConfigError(f"{name} must be at least 1, got {value}")
        if value is not None and value > MOST.get(name, value):
            raise ConfigError(f"{name} must be at most {MOST[name]}, got {value}")
    if not 0 <= args.core_restarts <= 100:
        raise ConfigError(f"core_restarts must be in [0, 100], got {args.core_restarts}")
    if not 0.0 < args.memory_fraction <= 1.0:
        raise ConfigError(f"memory_fraction (gpu_memory_utilization) must be in (0, 1], got {args.memory_fraction}")
    if args.block_size is not None and args.block_size not in _BLOCK_SIZES:
        raise ConfigError(f"block_size must be one of {', '.join(map(str, _BLOCK_SIZES))}, got {args.block_size}")
    if not -(2**63) <= args.seed < 2**63:
        raise ConfigError(f"seed must fit 64 bits, got {args.seed}")
    if args.served_model_name is not None and not args.served_model_name:
        raise ConfigError("served_model_name must not be empty")
