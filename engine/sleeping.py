"""Cores that end and start again while their callers wait: a machine's memory is free meanwhile, or other weights of
the same model are served from then on."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import Protocol, runtime_checkable

from msgspec.structs import fields, replace

from engine.config import EngineArgs, EngineConfig
from engine.core.client import CoreClient
from engine.errors import ConfigError
from engine.models.description import ModelDescription
from engine.plan import resolve_with_plan

logger = logging.getLogger(__name__)

_OF_THE_MODEL = (
    "spec",
    "facts",
    "eos_token_ids",
    "bos_token_id",
    "max_position",
    "pooling",
    "generates",
    "head",
    "quantized",
)
"""what of a description whoever holds one relies on"""
_OF_A_FILE = {"_name_or_path", "transformers_version"}
"""what config.json says of itself"""


@runtime_checkable
class Sleeper(Protocol):
    """A client whose core may end without being missed."""

    @property
    def is_sleeping(self) -> bool: ...

    def sleep(self) -> None:
        """The core ends, and its memory is free. Idempotent. Raises `ConfigError` where requests would be lost."""
        ...

    def wake_up(self, config: EngineConfig | None = None) -> None:
        """It starts again, from now on as `config` says. Raises what starting raises, and sleeps on. Idempotent."""
        ...


def sleeper(client: CoreClient) -> Sleeper:
    """Raises `ConfigError` for a core that cannot end without the engine."""
    if not isinstance(client, Sleeper):
        raise ConfigError("sleep: with core_restarts=0 the engine ends with its core")
    return client


def is_sleeping(client: CoreClient) -> bool:
    return isinstance(client, Sleeper) and client.is_sleeping


def with_weights(args: EngineArgs, model: ModelDescription, config: EngineConfig, path: str) -> EngineConfig:
    """The configuration for the weights at `path`, with which nothing else changes. Raises `ConfigError` and the like
    for a model that differs in more than its weights."""
    names = {"tokenizer": config.model.tokenizer, "served_model_name": config.model.served_name}
    found, new = resolve_with_plan(replace(args, model=path, **names))
    differing = [name for name in _OF_THE_MODEL if _differ(found, model, name)]
    if model.spec is None and _shape(found.hf_config) != _shape(model.hf_config):
        differing.append("config.json")
    if differing:
        raise ConfigError(f"{path}: this is another model ({', '.join(differing)}): only its weights may differ")
    expected = replace(config, model=replace(config.model, path=new.model.path))
    if new != expected:
        differing = [each.name for each in fields(new) if _differ(new, expected, each.name)]
        raise ConfigError(f"{path}: with it other settings would be chosen ({', '.join(differing)})")
    return new


def _shape(config: Mapping[str, object]) -> dict[str, object]:
    return {name: value for name, value in config.items() if name not in _OF_A_FILE}


def _differ(one: object, other: object, name: str) -> bool:
    return bool(getattr(one, name) != getattr(other, name))


def change_weights(client: Sleeper, config: EngineConfig) -> None:
    """It wakes up with them, whether it slept or not. Where they do not load, what was served before is served again,
    and the error is raised."""
    client.sleep()
    try:
        client.wake_up(config)
    except BaseException:
        logger.exception("other weights could not be loaded: those before are loaded again")
        client.wake_up()
        raise
