"""What an embedding model's files say of how its hidden states become one vector: sentence-transformers' modules, or a
GGUF file's pooling type."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Literal

import msgspec

from engine.errors import ConfigError
from engine.models.bounds import CONFIG_BYTES
from engine.models.json_file import read_json_object, read_json_value, shown

_TYPES: dict[str, Literal["last", "mean"]] = {"pooling_mode_lasttoken": "last", "pooling_mode_mean_tokens": "mean"}
_MODES: dict[str, Literal["last", "mean"]] = {"lasttoken": "last", "mean": "mean"}
_GGUF_TYPES: dict[object, Literal["last", "mean"]] = {1: "mean", 3: "last"}


class PoolingDefaults(msgspec.Struct, frozen=True, kw_only=True):
    """Without files that say otherwise the last token's state, normalised: what most embedding models use that were
    made of decoders."""

    pooling_type: Literal["last", "mean"] = "last"
    normalize: bool = True
    prompts: dict[str, str] = {}
    """texts that go before others, by their use: "query", "document" """
    declared: bool = False
    """it is an embedding model by its own account: nobody wants its next token"""
    unsupported: str = ""
    """why this model's embeddings cannot be made here; empty: they can"""


def pooling_of(directory: Path) -> PoolingDefaults:
    """Of a Hugging Face directory. Raises `ConfigError` for files that are damaged."""
    modules_file = directory / "modules.json"
    if not modules_file.is_file():
        return PoolingDefaults()
    modules = read_json_value(modules_file, CONFIG_BYTES)
    if not isinstance(modules, list) or not all(isinstance(each, dict) for each in modules):
        raise ConfigError(f"{modules_file}: a list of modules is expected")
    kinds = {str(each.get("type")).rpartition(".")[2]: str(each.get("path", "")) for each in modules}
    others = sorted(kinds.keys() - {"Transformer", "Pooling", "Normalize"})
    if others:
        return PoolingDefaults(declared=True, unsupported=f"its modules {shown(others)} are not known here")
    folder = Path(kinds.get("Pooling", "")).name
    given = _pooling(directory / folder / "config.json") if "Pooling" in kinds else "last"
    if given is None:
        return PoolingDefaults(declared=True, unsupported="its pooling is neither that of the last token nor the mean")
    return PoolingDefaults(
        pooling_type=given, normalize="Normalize" in kinds, prompts=_prompts(directory), declared=True
    )


def pooling_of_gguf(metadata: Mapping[str, object]) -> PoolingDefaults:
    """Of a GGUF file, by its metadata."""
    kind = metadata.get(f"{metadata.get('general.architecture')}.pooling_type")
    if kind in (None, 0):
        return PoolingDefaults()
    if kind not in _GGUF_TYPES:
        return PoolingDefaults(unsupported=f"its pooling_type {shown(kind)} is neither mean (1) nor last (3)")
    return PoolingDefaults(pooling_type=_GGUF_TYPES[kind])


def _pooling(file: Path) -> Literal["last", "mean"] | None:
    """None for what is not known here, or several at once."""
    config = read_json_object(file, CONFIG_BYTES)
    if config.get("include_prompt") is False:
        return None
    asked = [name for name, value in config.items() if name.startswith("pooling_mode_") and value is True]
    if not asked:
        return _MODES.get(str(config.get("pooling_mode")))
    return _TYPES.get(asked[0]) if len(asked) == 1 else None


def _prompts(directory: Path) -> dict[str, str]:
    file = directory / "config_sentence_transformers.json"
    found = read_json_object(file, CONFIG_BYTES).get("prompts") if file.is_file() else None
    if not isinstance(found, dict):
        return {}
    return {name: text for name, text in found.items() if isinstance(text, str) and text}
