"""Command-line options shared by the doors, and how they become `EngineArgs`. Nothing heavy: --help is instant.

An option that is None was not set: then the setting's own default holds.
"""

from __future__ import annotations

import argparse
import os
from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING

from engine.command_line import add_engine_options, core_list, json_object, size_bytes

if TYPE_CHECKING:
    from engine.config import EngineArgs

__all__ = ["add_engine_options", "core_list", "engine_args", "json_object", "refuse_without_effect", "size_bytes"]


def refuse_without_effect(
    parser: argparse.ArgumentParser, options: argparse.Namespace, names: Iterable[str], because: str
) -> None:
    """Exits with a usage error when one of the options `names` was set although it would do nothing."""
    for action in parser._actions:
        if action.dest in names and getattr(options, action.dest) != action.default:
            parser.error(f"{'/'.join(action.option_strings)} has no effect {because}")


def default_cache_dir() -> str:
    """PAGELOOM_CACHE, or `pageloom` in the user's cache directory (XDG_CACHE_HOME)."""
    own = os.environ.get("PAGELOOM_CACHE")
    base = os.environ.get("XDG_CACHE_HOME") or str(Path.home() / ".cache")
    return own or str(Path(base) / "pageloom")


def engine_args(options: argparse.Namespace, model: str | None) -> EngineArgs:
    """EngineArgs from parsed options; without a model, the demo model and what its authors recommend."""
    import msgspec

    from engine.config import EngineArgs
    from engine.frontend.demo import RECOMMENDED_GENERATION, demo_model_path
    from engine.limits import parse_limits
    from engine.vllm_names import VLLMS_NAMES, translated

    names = {field.name for field in msgspec.structs.fields(EngineArgs)}
    given = {name: value for name, value in vars(options).items() if name in names and value is not None}
    vllms = {name: getattr(options, f"vllms_{name}", None) for name in VLLMS_NAMES}
    settings = {name: value for name, value in given.items() if name == "swap_space"}
    given |= translated({**settings, **{name: value for name, value in vllms.items() if value is not None}})
    given["limits"] = parse_limits(options.limits)
    given["cache_dir"] = given.get("cache_dir") or default_cache_dir()
    if model is None:
        given["override_generation_config"] = RECOMMENDED_GENERATION | options.override_generation_config
    given["model"] = model if model is not None else demo_model_path()
    return msgspec.convert(given, EngineArgs)
