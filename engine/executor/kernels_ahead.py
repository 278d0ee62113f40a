"""The CPU's kernel libraries, compiled while the process still imports and loads: a first start is mostly their build.

Nothing waits here and nothing fails here: whoever needs a library asks for it in the usual way, waits for a build that
is under way (`attention_backends.toolchain.build_once`), and reports its failure.
"""

from __future__ import annotations

import importlib
import logging
import threading
from pathlib import Path
from typing import Protocol, cast

from attention_backends import native_build
from attention_backends.native_build import NativeSources
from attention_backends.toolchain import BuildError
from compilation.directory import trusted_tree
from compilation.errors import CompileError
from engine.config import EngineConfig
from engine.core.rounds import in_rounds
from engine.errors import ConfigError

logger = logging.getLogger(__name__)

DESCRIPTIONS = (
    "attention_backends.build",
    "attention_backends.crew_sources",
    "engine.cpu_kernels.build",
    "engine.sampling_sources",
    "engine.draft_sources",
)
"""modules that describe a library (`sources()`) and import nothing heavy"""
DESCRIPTIONS_OF_RANKS = (*DESCRIPTIONS, "engine.parallel.build")


class _Describes(Protocol):
    def sources(self) -> NativeSources: ...


def check_cache(config: EngineConfig) -> None:
    """Before any library is built into the cache directory or loaded from it: that nobody else may write there. Raises
    `ConfigError`."""
    try:
        trusted_tree(Path(config.compile.cache_dir))
    except CompileError as error:
        raise ConfigError(f"{error} (--cache-dir)") from error


def build_ahead(config: EngineConfig) -> None:
    """Begin to build the libraries that are neither cached nor came with the package; returns at once."""
    if config.device.kind != "cpu":
        return
    cache_dir, has_group = Path(config.compile.cache_dir), config.parallel.ranks > 1 or in_rounds(config)
    for module in DESCRIPTIONS_OF_RANKS if has_group else DESCRIPTIONS:
        sources = cast(_Describes, importlib.import_module(module)).sources()
        name = f"build-{sources.folder}"
        threading.Thread(target=_build, args=(sources, cache_dir), name=name, daemon=True).start()


def _build(sources: NativeSources, cache_dir: Path) -> None:
    try:
        native_build.build_for_this_cpu(sources, cache_dir)
    except (BuildError, OSError) as error:
        logger.debug("%s was not built ahead: %s", sources.folder, error)
