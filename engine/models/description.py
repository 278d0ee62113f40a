"""What a model is, read in milliseconds and without torch: front end, resolver and core all start from here."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Literal, cast

import msgspec

from engine.errors import ConfigError, UnsupportedModelError
from engine.models.bounds import CONFIG_BYTES
from engine.models.facts import ModelFacts
from engine.models.families.common import check_ranges
from engine.models.families.registry import family_named, find_family, text_config
from engine.models.generation import generation_defaults
from engine.models.gguf_config import dtype_of, generation_config_of, hf_config_of
from engine.models.gguf_header import read_gguf_header
from engine.models.heads import HeadSpec, head_of, with_token_ids
from engine.models.json_file import read_json_object, shown
from engine.models.mixers import MixerSpec
from engine.models.pooling import AS_ENCODERS, PoolingDefaults, pooling_of, pooling_of_gguf
from engine.models.quantization import StoredFormat, native_only, stored_format
from engine.models.spec import DecoderSpec

ModelDType = Literal["bfloat16", "float16", "float32"]
_DTYPES = ("bfloat16", "float16", "float32")
ModelImpl = Literal["auto", "native", "transformers"]
"""who computes a model: a family of ours, or the transformers library's own module"""


class ModelDescription(msgspec.Struct, frozen=True, kw_only=True):
    path: str
    source: Literal["hf", "gguf"]
    hf_config: dict[str, object]
    """config.json, or what it would be for a GGUF file"""
    quantized: StoredFormat | None = None
    """how safetensors hold quantised weights, where they do"""
    spec: DecoderSpec | None
    """which a family made of it; None: the transformers library's own module serves"""
    facts: ModelFacts
    eos_token_ids: tuple[int, ...]
    """every id that ends a generation, without repeats"""
    bos_token_id: int | None
    default_dtype: ModelDType
    """how the weights are stored; bfloat16 for quantised GGUF"""
    max_position: int
    """tokens that a sequence may have"""
    vocab_size: int
    pooling: PoolingDefaults
    """how prompts become vectors"""
    generates: bool
    """false: an embedding model, or a bare one: its checkpoint may have no head"""
    head: HeadSpec | None
    """of a model that judges texts"""
    generation_defaults: dict[str, bool | int | float]
    """the sampling values that the model's authors recommend, under generation_config.json's names; may be empty.
    `engine.resolve.resolve_here` puts what the user wants in their place and checks the ranges."""


def describe(path: str, model_impl: ModelImpl = "auto") -> ModelDescription:
    """Describe a Hugging Face directory or one `.gguf` file. "auto": by a family of ours, else by the transformers
    library, whose import takes seconds; GGUF files by a family alone.

    Raises ConfigError when the path is neither or its config is malformed, UnsupportedModelError (with the list of
    what is supported) for a model that no family covers, WeightsError for a damaged GGUF file.
    """
    location = Path(path)
    if location.is_file() and location.suffix.lower() == ".gguf":
        header = read_gguf_header(location)
        config = hf_config_of(header)
        pooling = pooling_of_gguf(header.metadata)
        if model_impl == "transformers":
            raise UnsupportedModelError(f"{path}: model_impl='transformers' reads no GGUF files; use 'auto'")
        generation_read = (path, generation_config_of(header))
        return _described(path, "gguf", (path, config), generation_read, dtype_of(header), pooling, "native")
    config_file, generation_file = location / "config.json", location / "generation_config.json"
    if not config_file.is_file():
        raise ConfigError(f"model: {path} is neither a directory with a config.json nor a .gguf file")
    with _errors_name(str(config_file)):
        config = text_config(read_json_object(config_file, CONFIG_BYTES))
    generation = read_json_object(generation_file, CONFIG_BYTES) if generation_file.is_file() else {}
    dtype = config.get("dtype") or config.get("torch_dtype") or "float32"
    read, generation_read = (str(config_file), config), (str(generation_file), generation)
    return _described(path, "hf", read, generation_read, dtype, pooling_of(location), model_impl)


_Read = tuple[str, Mapping[str, object]]
"""a file's name and what it holds"""


def _described(
    path: str,
    source: Literal["hf", "gguf"],
    config_read: _Read,
    generation_read: _Read,
    dtype: object,
    pooling: PoolingDefaults,
    model_impl: ModelImpl,
) -> ModelDescription:
    (config_file, config), (generation_file, generation) = config_read, generation_read
    with _errors_name(config_file):
        quantized = stored_format(config)
        if quantized is not None:
            model_impl = native_only(quantized, model_impl)
    stored = dtype.removeprefix("torch.") if isinstance(dtype, str) else dtype
    if stored not in _DTYPES:
        raise UnsupportedModelError(
            f"{config_file}: dtype {shown(dtype)} is not supported; supported are {', '.join(_DTYPES)}"
        )
    with _errors_name(config_file):
        config = with_token_ids(config, Path(path))
        spec, facts, generates = _computed(path, config, model_impl, pooling.declared)
        if pooling == PoolingDefaults() and spec is not None and not family_named(spec.family).causal:
            pooling = AS_ENCODERS
        starts, ends = _token_ids(config, "bos_token_id"), _token_ids(config, "eos_token_id")
    with _errors_name(generation_file):
        starts = _token_ids(generation, "bos_token_id") or starts
        ends = [*_token_ids(generation, "eos_token_id"), *ends]
        defaults = generation_defaults(generation)
    return ModelDescription(
        path=path,
        source=source,
        hf_config=dict(config),
        quantized=quantized,
        spec=spec,
        facts=facts,
        # Configs of small models often keep ids of the family's large vocabulary; no such token can come.
        eos_token_ids=tuple(dict.fromkeys(token for token in ends if token < facts.vocab_size)),
        bos_token_id=starts[0] if starts else None,
        default_dtype=cast(ModelDType, stored),
        max_position=min(facts.max_position, pooling.max_length or facts.max_position),
        vocab_size=facts.vocab_size,
        pooling=pooling,
        generates=generates,
        head=None if spec is None else spec.head,
        generation_defaults=defaults,
    )


def _computed(
    path: str, config: Mapping[str, object], model_impl: ModelImpl, embeds: bool
) -> tuple[DecoderSpec | None, ModelFacts, bool]:
    """The spec, where a family of ours computes the model; its facts; whether it generates. `embeds`: by its own
    account."""
    reason = ""
    if model_impl != "transformers":
        try:
            family, purpose, form = find_family(config)
            head = None if form is None else head_of(config, form, purpose)
            generates = purpose == "generates" and not embeds
            needs_head = generates or (head is not None and head.token_ids)
            spec = family.spec(config if needs_head else {**config, "tie_word_embeddings": True})
            if generates and not spec.causal:
                raise UnsupportedModelError("attention looks both ways, and such a model generates nothing")
            if not spec.causal and not all(isinstance(layer.mixer, MixerSpec) for layer in spec.layers):
                raise UnsupportedModelError("is_causal false is not supported where layers have states: they look back")
            spec = msgspec.structs.replace(spec, head=head)
            return spec, spec.facts, generates
        except UnsupportedModelError as error:
            if model_impl == "native":
                raise
            reason = f"{str(error).partition('; supported')[0]} (docs/models.md), and not through transformers: "
    check_ranges(config)
    from engine.models.fallback.facts import read_facts

    try:
        facts, generates = read_facts(path)
    except UnsupportedModelError as error:
        raise UnsupportedModelError(f"{reason}{error}") from error
    return None, facts, generates and not embeds


@contextmanager
def _errors_name(file: str) -> Iterator[None]:
    """Puts the file's name before the key that an error names."""
    try:
        yield
    except (ConfigError, UnsupportedModelError) as error:
        raise type(error)(f"{file}: {error}") from error


def _token_ids(config: Mapping[str, object], key: str) -> list[int]:
    value = config.get(key)
    if value is None:
        return []
    given = value if isinstance(value, list) else [value]
    ids = [token for token in given if isinstance(token, int) and not isinstance(token, bool) and token >= 0]
    if len(ids) < len(given):
        raise ConfigError(f"{key} must be a token id or a list of them, found {shown(value)}")
    return ids
