"""What the bytes of a page mean: two engines whose layouts are equal may read each other's pages, others may not."""

from __future__ import annotations

from hashlib import blake2b
from pathlib import Path

import msgspec

from engine.config import EngineConfig

_SAMPLES, _SAMPLE_BYTES = 9, 1 << 16


def layout_of(config: EngineConfig, backend: str, shapes: list[tuple[int, ...]], windows: object) -> str:
    """`backend`: of attention; `shapes`: of each layer's block in it, rank 0's; `windows`: of layer groups."""
    facts = (
        weights_of(config),
        config.model.dtype,
        config.model.quantization,
        config.model.model_impl,
        config.cache.dtype,
        config.cache.block_size,
        config.parallel.tensor,
        msgspec.json.encode(config.scheduler.speculation).decode() if _shares_pages(config) else "",
        backend,
        shapes,
        repr(windows),
    )
    return blake2b(repr(facts).encode(), digest_size=16).hexdigest()


def _shares_pages(config: EngineConfig) -> bool:
    """A draft model's keys and values lie beside the model's own."""
    return config.scheduler.speculation.method in ("draft_model", "eagle3")


def weights_of(config: EngineConfig) -> str:
    """A fingerprint of what is loaded, wherever it lies: sizes, and samples of what the files hold."""
    if config.model.load_format == "dummy":
        return f"dummy {config.model.seed}"
    path = Path(config.model.path)
    files = [path] if path.is_file() else sorted(each for each in path.glob("*") if each.suffix in _WEIGHTS)
    digest = blake2b(digest_size=16)
    for file in files:
        size = file.stat().st_size
        digest.update(f"{file.name if path.is_dir() else ''} {size}".encode())
        with file.open("rb") as opened:
            for sample in range(_SAMPLES):
                opened.seek(max(size - _SAMPLE_BYTES, 0) * sample // (_SAMPLES - 1))
                digest.update(opened.read(_SAMPLE_BYTES))
    return digest.hexdigest()


_WEIGHTS = {".safetensors", ".gguf", ".bin", ".json"}
