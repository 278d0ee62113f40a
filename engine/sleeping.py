"""Cores that end and start again while their callers wait: a machine's memory is free meanwhile, or other weights of
the same model are served from then on."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

from msgspec import Struct
from msgspec.structs import fields, replace

from engine.config import EngineArgs, EngineConfig
from engine.core.client import CoreClient, InProcessClient
from engine.core.sleeper import Sleeper
from engine.core.wire import CoreReady
from engine.errors import ConfigError, WeightsError
from engine.kv_transfer.layout import weights_of
from engine.models.description import ModelDescription
from engine.plan import damage, resolve_with_plan

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
_OF_A_FORM = {"model.quantization", "model.dtype"}
"""settings that are chosen by how a checkpoint is stored"""
_OF_A_FILE = {"_name_or_path", "transformers_version"}
"""what config.json says of itself"""
_MOST_CHANGES, _CHANGE_CHARS = 4, 120
"""of what another model's config.json says, in a message"""


def sleeper(client: CoreClient, *, apart: bool = False) -> Sleeper:
    """Raises `ConfigError` for a core that cannot end without the engine. `apart`: it is to wait in another thread."""
    if apart and isinstance(client, InProcessClient):
        raise ConfigError("sleep: with in_process the core turns on the event loop, which waits for nobody")
    if not isinstance(client, Sleeper):
        raise ConfigError("sleep: with core_restarts=0 the engine ends with its core")
    return client


def is_sleeping(client: CoreClient) -> bool:
    return isinstance(client, Sleeper) and client.is_sleeping


def ready_with(ready: CoreReady, config: EngineConfig) -> CoreReady:
    """Of a core that serves these weights now: who takes its pages must know."""
    if not ready.kv_layout:
        return ready
    return replace(ready, kv_layout={**ready.kv_layout, "weights": weights_of(config)})


def with_weights(args: EngineArgs, model: ModelDescription, config: EngineConfig, path: str) -> EngineConfig:
    """The configuration for the weights at `path`, with which nothing else changes. Raises `ConfigError` and the like
    for a model that differs in more than its weights."""
    try:
        there, same = Path(path).exists(), _same_tokenizer(Path(path), Path(config.model.path))
    except OSError as error:
        raise ConfigError(f"{path}: {error.strerror}") from error
    if not there:
        raise ConfigError(f"{path}: there is no such file or directory")
    if not same:
        raise ConfigError(f"{path}: its tokenizer.json is another one: only weights may differ")
    names = {"tokenizer": config.model.tokenizer, "served_model_name": config.model.served_name}
    found, new = resolve_with_plan(replace(args, model=path, revision=None, download_dir=None, **names))
    differing = [
        each for name in _OF_THE_MODEL for each in _differing(getattr(found, name), getattr(model, name), name)
    ]
    if model.spec is None and _shape(found.hf_config) != _shape(model.hf_config):
        differing.append("config.json")
    settings = list(_differing(new, replace(config, model=replace(config.model, path=new.model.path))))
    _check_form(path, model, found, [*differing, *settings])
    if differing:
        named = ", ".join(_changes(model.hf_config, found.hf_config) or dict.fromkeys(differing))
        raise ConfigError(f"{path}: this is another model ({named}): only its weights may differ")
    if settings:
        raise ConfigError(f"{path}: with it other settings would be chosen ({', '.join(dict.fromkeys(settings))})")
    if args.load_format == "auto" and (damaged := damage(new.model.path)):
        raise WeightsError(damaged[0])
    return new


def _check_form(path: str, model: ModelDescription, found: ModelDescription, differing: Sequence[str]) -> None:
    """Raises `ConfigError` where what is `differing` comes of how `found` is stored; of a file of another kind anything
    may, since it describes the model otherwise, too."""
    served, there = _form(model), _form(found)
    stored = all(name in _OF_A_FORM or name.startswith("quantized") for name in differing)
    if differing and served != there and (stored or model.source != found.source):
        raise ConfigError(
            f"{path}: its weights are stored otherwise than those that are served: {there} there, {served} in "
            f"{model.path}; only a checkpoint stored alike can take its place"
        )


def _form(model: ModelDescription) -> str:
    """How its file holds weights."""
    if model.source == "gguf":
        return "GGUF"
    how = model.default_dtype if model.quantized is None else f"quantised by {model.quantized.method}"
    return f"safetensors, {how}"


def _same_tokenizer(one: Path, other: Path) -> bool:
    """As far as both have a file of it."""
    files = one / "tokenizer.json", other / "tokenizer.json"
    return not all(each.is_file() for each in files) or files[0].read_bytes() == files[1].read_bytes()


def _shape(config: Mapping[str, object]) -> dict[str, object]:
    return {name: value for name, value in config.items() if name not in _OF_A_FILE}


def _changes(one: Mapping[str, object], other: Mapping[str, object]) -> list[str]:
    """Some of what config.json says otherwise, as a reader of it knows it."""
    one, other = _shape(one), _shape(other)
    names = [name for name in sorted({*one, *other}) if one.get(name) != other.get(name)]
    found = [f"{name}: {one.get(name)} here, {other.get(name)} there"[:_CHANGE_CHARS] for name in names[:_MOST_CHANGES]]
    return [*found, "..."] if len(names) > _MOST_CHANGES else found


def _differing(one: object, other: object, name: str = "") -> Iterator[str]:
    """The innermost fields of structs, and of tuples of them, in which they differ."""
    if isinstance(one, tuple) and isinstance(other, tuple) and len(one) == len(other):
        for mine, theirs in zip(one, other, strict=True):
            yield from _differing(mine, theirs, name)
    elif isinstance(one, Struct) and type(one) is type(other):
        for each in fields(one):
            yield from _differing(getattr(one, each.name), getattr(other, each.name), f"{name}.{each.name}".strip("."))
    elif one != other:
        yield name
