"""What a model is, read in milliseconds and without torch: front end, resolver and core all start from here."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Literal, cast

import msgspec

from engine.errors import ConfigError, UnsupportedModelError
from engine.models.families.registry import find_family
from engine.models.gguf_config import dtype_of, generation_config_of, hf_config_of
from engine.models.gguf_header import read_gguf_header
from engine.models.spec import DecoderSpec

ModelDType = Literal["bfloat16", "float16", "float32"]
_DTYPES = ("bfloat16", "float16", "float32")
_SAMPLING_DEFAULTS = ("do_sample", "temperature", "top_k", "top_p", "min_p", "repetition_penalty", "max_new_tokens")


class ModelDescription(msgspec.Struct, frozen=True, kw_only=True):
    path: str
    source: Literal["hf", "gguf"]
    hf_config: dict[str, object]
    """config.json, or what it would be for a GGUF file"""
    spec: DecoderSpec
    eos_token_ids: tuple[int, ...]
    """every id that ends a generation, without repeats"""
    bos_token_id: int | None
    default_dtype: ModelDType
    """how the weights are stored; bfloat16 for quantised GGUF"""
    max_position: int
    vocab_size: int
    generation_defaults: dict[str, bool | int | float]
    """the sampling values that the model's authors recommend, under generation_config.json's names; may be empty"""


def describe(path: str) -> ModelDescription:
    """Describe a Hugging Face directory or one `.gguf` file.

    Raises ConfigError when the path is neither or its config is malformed, UnsupportedModelError (with the list of
    what is supported) for a model that no family covers, WeightsError for a damaged GGUF file.
    """
    location = Path(path)
    if location.is_file() and location.suffix.lower() == ".gguf":
        header = read_gguf_header(location)
        config = hf_config_of(header)
        return _described(path, "gguf", config, generation_config_of(header), dtype_of(header))
    if not (location / "config.json").is_file():
        raise ConfigError(f"model: {path} is neither a directory with a config.json nor a .gguf file")
    config = _read_json(location / "config.json")
    generation_file = location / "generation_config.json"
    generation = _read_json(generation_file) if generation_file.is_file() else {}
    dtype = config.get("dtype") or config.get("torch_dtype") or "float32"
    return _described(path, "hf", config, generation, str(dtype))


def _described(
    path: str, source: Literal["hf", "gguf"], config: dict[str, object], generation: dict[str, object], dtype: str
) -> ModelDescription:
    for key in ("quantization_config", "compression_config"):
        quantization = config.get(key)
        if quantization:
            method = quantization.get("quant_method") if isinstance(quantization, Mapping) else quantization
            raise UnsupportedModelError(
                f"{path}: {key} ({method}) is not supported; unquantised safetensors and GGUF files are"
            )
    dtype = dtype.removeprefix("torch.")
    if dtype not in _DTYPES:
        raise UnsupportedModelError(f"{path}: dtype {dtype!r} is not supported; supported are {', '.join(_DTYPES)}")
    try:
        spec = find_family(config).spec(config)
    except (ConfigError, UnsupportedModelError) as error:
        raise type(error)(f"{path}: {error}") from error
    starts = _token_ids(generation, "bos_token_id") or _token_ids(config, "bos_token_id")
    ends = (*_token_ids(generation, "eos_token_id"), *_token_ids(config, "eos_token_id"))
    return ModelDescription(
        path=path,
        source=source,
        hf_config=config,
        spec=spec,
        eos_token_ids=tuple(dict.fromkeys(ends)),
        bos_token_id=starts[0] if starts else None,
        default_dtype=cast(ModelDType, dtype),
        max_position=spec.max_position,
        vocab_size=spec.vocab_size,
        generation_defaults={
            key: value for key in _SAMPLING_DEFAULTS if isinstance(value := generation.get(key), (bool, int, float))
        },
    )


def _token_ids(config: Mapping[str, object], key: str) -> tuple[int, ...]:
    value = config.get(key)
    if value is None:
        return ()
    ids = value if isinstance(value, list) else [value]
    if not all(isinstance(token, int) and token >= 0 for token in ids):
        raise ConfigError(f"{key} must be a token id or a list of them, found {value!r}")
    return tuple(ids)


def _read_json(file: Path) -> dict[str, object]:
    try:
        content = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ConfigError(f"{file}: cannot be read as JSON: {error}") from error
    if not isinstance(content, dict):
        raise ConfigError(f"{file}: holds {type(content).__name__}, not an object")
    return content
