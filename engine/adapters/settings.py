"""What a user says of adapters, checked."""

from __future__ import annotations

from typing import TYPE_CHECKING

from engine.adapters.config import LoRAConfig
from engine.errors import ConfigError

if TYPE_CHECKING:
    from engine.config import EngineArgs
    from engine.models.description import ModelDescription

_MOST_RANK = 512
_MOST_SLOTS = 1024
_RANK, _SLOTS = 16, 8


def lora_of(args: EngineArgs, kind: str, model: ModelDescription) -> LoRAConfig | None:
    """None: adapters are off. Raises `ConfigError` naming the setting."""
    names = ("max_lora_rank", "max_lora_expert_rank", "max_loras", "max_cpu_loras")
    given = [name for name in names if getattr(args, name) is not None]
    if not args.enable_lora:
        if given:
            raise ConfigError(f"{given[0]} is of adapters: set enable_lora, too, or leave it out")
        return None
    _refuse(args, kind, model)
    rank = _within("max_lora_rank", args.max_lora_rank, _RANK, _MOST_RANK)
    slots = _within("max_loras", args.max_loras, _SLOTS, _MOST_SLOTS)
    kept = args.max_cpu_loras if args.max_cpu_loras is not None else slots
    if kept < slots:
        raise ConfigError(f"max_cpu_loras ({kept}) must be at least max_loras ({slots})")
    of_experts = _expert_rank(args, kind, model)
    return LoRAConfig(max_lora_rank=rank, max_lora_expert_rank=of_experts, max_loras=slots, max_cpu_loras=kept)


def _expert_rank(args: EngineArgs, kind: str, model: ModelDescription) -> int:
    if not args.max_lora_expert_rank:
        return 0
    rank = _within("max_lora_expert_rank", args.max_lora_expert_rank, 0, _MOST_RANK)
    if model.spec is not None and all(layer.experts is None for layer in model.spec.layers):
        raise ConfigError("max_lora_expert_rank: the model has no experts; leave it out")
    if kind != "cpu":
        raise ConfigError("max_lora_expert_rank: experts are adapted on CPUs so far; leave it out")
    return rank


def _within(name: str, given: int | None, default: int, most: int) -> int:
    value = default if given is None else given
    if not 1 <= value <= most:
        raise ConfigError(f"{name} must be in [1, {most}], got {value}")
    return value


def _refuse(args: EngineArgs, kind: str, model: ModelDescription) -> None:
    """What adapters do not go together with so far."""
    if kind != "cpu" and args.speculative_config:
        raise ConfigError("enable_lora does not go together with speculative_config on GPUs so far: leave one out")
    for name in ("enable_expert_parallel", "kv_transfer_config", "kv_events_config"):
        if getattr(args, name):
            raise ConfigError(f"enable_lora does not go together with {name} so far: leave one out")
    if model.spec is None:
        raise ConfigError("enable_lora: the model runs through the transformers library's module, without adapters")
    if not model.generates:
        raise ConfigError("enable_lora: adapters are of models that generate so far; leave it out")
