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

PoolingType = Literal["last", "mean", "cls", "max"]
_MODES: dict[str, PoolingType] = {"lasttoken": "last", "mean": "mean", "cls": "cls", "max": "max"}
_TYPES: dict[str, PoolingType] = {
    "pooling_mode_lasttoken": "last",
    "pooling_mode_mean_tokens": "mean",
    "pooling_mode_cls_token": "cls",
    "pooling_mode_max_tokens": "max",
}
_GGUF_TYPES: dict[object, PoolingType] = {1: "mean", 2: "cls", 3: "last"}
_KNOWN = ("Transformer", "Pooling", "Dense", "Normalize")
_ACTIVATIONS: dict[str, Literal["tanh", "identity"]] = {"Tanh": "tanh", "Identity": "identity"}


class DenseSpec(msgspec.Struct, frozen=True, kw_only=True):
    """A layer behind pooling. `directory`: where its weights are."""

    directory: str
    activation: Literal["tanh", "identity"]


class PoolingDefaults(msgspec.Struct, frozen=True, kw_only=True):
    """Without files that say otherwise the last token's state, normalised: what most embedding models use that were
    made of decoders. Of an encoder the first one's (`AS_ENCODERS`), as vLLM has it."""

    pooling_type: PoolingType = "last"
    dense: tuple[DenseSpec, ...] = ()
    normalize: bool = True
    prompts: dict[str, str] = {}
    """texts that go before others, by their use: "query", "document" """
    default_prompt: str | None = None
    """the use that is meant where none is named"""
    declared: bool = False
    """it is an embedding model by its own account: nobody wants its next token"""
    max_length: int | None = None
    """tokens of the longest text that it was made for, where its files tell: positions may be more"""
    unsupported: str = ""
    """why this model's embeddings cannot be made here; empty: they can"""

    @property
    def before(self) -> str:
        """What stands before a text of which nobody says what it is for."""
        return "" if self.default_prompt is None else self.prompts[self.default_prompt]


AS_ENCODERS = PoolingDefaults(pooling_type="cls")


def pooling_of(directory: Path) -> PoolingDefaults:
    """Of a Hugging Face directory. Raises `ConfigError` for files that are damaged."""
    modules_file = directory / "modules.json"
    if not modules_file.is_file():
        return PoolingDefaults()
    modules = read_json_value(modules_file, CONFIG_BYTES)
    if not isinstance(modules, list) or not all(isinstance(each, dict) for each in modules):
        raise ConfigError(f"{modules_file}: a list of modules is expected")
    kinds = [(str(each.get("type")).rpartition(".")[2], Path(str(each.get("path", ""))).name) for each in modules]
    others = sorted({kind for kind, _ in kinds} - {*_KNOWN})
    if others:
        return PoolingDefaults(declared=True, unsupported=f"its modules {shown(others)} are not known here")
    if [kind for kind, _ in kinds] != sorted((kind for kind, _ in kinds), key=_KNOWN.index):
        return PoolingDefaults(declared=True, unsupported="its modules come in another order than is known here")
    folders = dict(kinds)
    given, found = _pooling(directory / folders["Pooling"] / "config.json") if "Pooling" in folders else ("last", "")
    if given is None:
        return PoolingDefaults(declared=True, unsupported=found)
    prompts, default_prompt = _prompts(directory)
    return PoolingDefaults(
        pooling_type=given,
        dense=tuple(_dense(directory / folder) for kind, folder in kinds if kind == "Dense"),
        normalize="Normalize" in folders,
        prompts=prompts,
        default_prompt=default_prompt,
        max_length=_max_length(directory / folders["Transformer"]) if "Transformer" in folders else None,
        declared=True,
    )


def pooling_of_gguf(metadata: Mapping[str, object]) -> PoolingDefaults:
    """Of a GGUF file, by its metadata."""
    kind = metadata.get(f"{metadata.get('general.architecture')}.pooling_type")
    if kind in (None, 0):
        return PoolingDefaults()
    if kind not in _GGUF_TYPES:
        return PoolingDefaults(unsupported=f"its pooling_type {shown(kind)} is none of mean (1), cls (2) and last (3)")
    return PoolingDefaults(pooling_type=_GGUF_TYPES[kind])


def _dense(directory: Path) -> DenseSpec:
    named = str(read_json_object(directory / "config.json", CONFIG_BYTES).get("activation_function", "Tanh"))
    activation = _ACTIVATIONS.get(named.rpartition(".")[2])
    if activation is None:
        known = ", ".join(_ACTIVATIONS)
        raise ConfigError(f"{directory}: activation_function {shown(named)} is not supported; {known} are")
    return DenseSpec(directory=str(directory), activation=activation)


def _pooling(file: Path) -> tuple[PoolingType | None, str]:
    """None for what is not known here, or several at once; and what is to be said of it."""
    config = read_json_object(file, CONFIG_BYTES)
    if config.get("include_prompt") is False:
        return None, "its pooling leaves out the tokens of the prompt (include_prompt false), which is not known here"
    asked = [name for name, value in config.items() if name.startswith("pooling_mode_") and value is True]
    if asked:
        found, named = _TYPES.get(asked[0]) if len(asked) == 1 else None, " and ".join(asked)
    else:
        mode = config.get("pooling_mode")
        found, named = _MODES.get(str(mode)), f"pooling_mode {shown(mode)}"
    return found, f"its pooling, {named}, is not one of {', '.join(_MODES.values())}"


def _max_length(directory: Path) -> int | None:
    """The file's name tells the kind of transformer, in older files."""
    for file in sorted(directory.glob("sentence_*_config.json")):
        found = read_json_object(file, CONFIG_BYTES).get("max_seq_length")
        if isinstance(found, int) and not isinstance(found, bool) and found > 0:
            return found
    return None


def _prompts(directory: Path) -> tuple[dict[str, str], str | None]:
    """And whose is meant where none is named."""
    file = directory / "config_sentence_transformers.json"
    config = read_json_object(file, CONFIG_BYTES) if file.is_file() else {}
    found, default = config.get("prompts"), config.get("default_prompt_name")
    if not isinstance(found, dict):
        return {}, None
    prompts = {name: text for name, text in found.items() if isinstance(text, str) and text}
    return prompts, default if isinstance(default, str) and default in prompts else None
