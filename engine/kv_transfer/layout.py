"""What the bytes of a page mean: two engines whose layouts are equal may read each other's pages, others may not, and
are told what differs."""

from __future__ import annotations

from collections.abc import Mapping
from hashlib import blake2b
from pathlib import Path

import msgspec

from engine.config import EngineConfig

_SAMPLES, _SAMPLE_BYTES = 9, 1 << 16


_FOLLOWS = "pages"
"""differs where another fact does, as a rule, and says less"""

Layout = dict[str, str]
"""settings as users know them, with their values"""


def layout_of(config: EngineConfig, backend: str, shapes: list[tuple[int, ...]], windows: object) -> Layout:
    """`backend`: of attention; `shapes`: of each layer's block in it, rank 0's; `windows`: of layer groups."""
    facts = {
        "weights": weights_of(config),
        "dtype": config.model.dtype,
        "quantization": config.model.quantization,
        "model_impl": config.model.model_impl,
        "kv_cache_dtype": config.cache.dtype,
        "block_size": config.cache.block_size,
        "tensor_parallel_size": config.parallel.tensor,
        "speculative_config": msgspec.json.encode(config.scheduler.speculation).decode()
        if _shares_pages(config)
        else None,
        "attention_backend": backend,
        _FOLLOWS: blake2b(repr((shapes, windows)).encode(), digest_size=8).hexdigest(),
    }
    if config.model.rope_by_length:
        facts["max_model_len"] = config.model.max_model_len
    return {name: str(value) for name, value in facts.items()}


def differences(one: Mapping[str, str], other: Mapping[str, str]) -> str:
    """What is not the same in both, with both values: "block_size 16 and 32"; empty: they may read each other's
    pages."""
    names = [name for name in {**one, **other} if one.get(name) != other.get(name)]
    names = [name for name in names if name != _FOLLOWS] or names
    return ", ".join(f"{name} {one.get(name)} and {other.get(name)}" for name in names)


def _shares_pages(config: EngineConfig) -> bool:
    """A draft model's keys and values lie beside the model's own."""
    return config.scheduler.speculation.method in ("draft_model", "eagle3", "mtp")


def weights_of(config: EngineConfig) -> str:
    """A fingerprint of what is loaded, wherever it lies: sizes, and samples of what the files hold."""
    if config.model.load_format == "dummy":
        return f"dummy {config.model.seed}"
    path = Path(config.model.path)
    files = [path] if path.is_file() else sorted(each for each in path.glob("*") if each.suffix in _WEIGHTS)
    digest = blake2b(digest_size=8)
    for file in files:
        size = file.stat().st_size
        digest.update(f"{file.name if path.is_dir() else ''} {size}".encode())
        with file.open("rb") as opened:
            for sample in range(_SAMPLES):
                opened.seek(max(size - _SAMPLE_BYTES, 0) * sample // (_SAMPLES - 1))
                digest.update(opened.read(_SAMPLE_BYTES))
    return digest.hexdigest()


_WEIGHTS = {".safetensors", ".gguf", ".bin", ".json"}
