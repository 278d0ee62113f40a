"""Command-line options shared by the doors, and how they become `EngineArgs`. Nothing heavy: --help is instant.

An option that is None was not set: then the setting's own default holds.
"""

from __future__ import annotations

import argparse
import os
from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from engine.command_line import FlexibleArgumentParser, Parser, add_options, core_list, json_object, size_bytes

if TYPE_CHECKING:
    from engine.config import EngineArgs

__all__ = [
    "FlexibleArgumentParser",
    "add_engine_options",
    "add_model",
    "check_writable",
    "core_list",
    "count",
    "counts",
    "engine_args",
    "json_object",
    "positive",
    "refuse_without_effect",
    "size_bytes",
]


class _Model(argparse.Action):
    def __call__(
        self, parser: argparse.ArgumentParser, namespace: argparse.Namespace, values: Any, option: str | None = None
    ) -> None:
        if namespace.model not in (None, values):
            parser.error(f"two models are named, {namespace.model} and {values}: give one, as MODEL or with --model")
        namespace.model = values


def add_model(
    parser: argparse.ArgumentParser,
    about: str = "Hugging Face directory, GGUF file, or hub's name (ORG/NAME, ORG/NAME:QUANT); without it, the demo "
    "model",
) -> None:
    """As MODEL, or with --model, which is vLLM's and llama.cpp's."""
    parser.add_argument("model", nargs="?", action=_Model, default=argparse.SUPPRESS, help=about)
    parser.add_argument("--model", "-m", action=_Model, metavar="MODEL", help="the same")


def add_engine_options(parser: Parser) -> None:
    """One for each setting of `EngineArgs`."""
    from engine.config import EngineArgs

    add_options(parser, EngineArgs, prefix="vllms_")


def refuse_without_effect(
    parser: argparse.ArgumentParser, options: argparse.Namespace, names: Iterable[str], because: str
) -> None:
    """Exits with a usage error when one of the options `names` was set although it would do nothing."""
    for action in parser._actions:
        default = None if action.default is argparse.SUPPRESS else action.default
        if action.dest in names and getattr(options, action.dest) != default:
            parser.error(f"{'/'.join(action.option_strings) or action.dest} has no effect {because}")


def count(text: str) -> int:
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is not a number from 1 on")
    return int(text)


def counts(text: str) -> list[int]:
    """'1,2,4' → [1, 2, 4]."""
    return [count(each.strip()) for each in text.split(",")]


def positive(text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = 0.0
    if not 0.0 < value < float("inf"):
        raise argparse.ArgumentTypeError(f"{text!r} is not a positive number")
    return value


def check_writable(file: Path) -> None:
    """Before what takes long. Raises ValueError."""
    if not file.parent.is_dir():
        raise ValueError(f"{file.parent} is not a directory: {file} could not be written")
    if file.is_dir() or not os.access(file if file.exists() else file.parent, os.W_OK):
        raise ValueError(f"{file} could not be written: it is a directory, or not yours")


def default_cache_dir() -> str:
    """PAGELOOM_CACHE, or `pageloom` in the user's cache directory (XDG_CACHE_HOME)."""
    own = os.environ.get("PAGELOOM_CACHE")
    base = os.environ.get("XDG_CACHE_HOME") or str(Path.home() / ".cache")
    return own or str(Path(base) / "pageloom")


def engine_args(options: argparse.Namespace, model: str | None) -> EngineArgs:
    """EngineArgs from parsed options; without a model, the demo model and what its authors recommend."""
    from engine.config import EngineArgs
    from engine.frontend.demo import RECOMMENDED_GENERATION, demo_model_path
    from engine.vllm_names import VLLMS_NAMES

    given: dict[str, Any] = {name: getattr(options, name, None) for name in EngineArgs.__struct_fields__}
    given |= {name: getattr(options, f"vllms_{name}", None) for name in VLLMS_NAMES}
    given["cache_dir"] = given["cache_dir"] or default_cache_dir()
    if model is None:
        given["override_generation_config"] = RECOMMENDED_GENERATION | (given["override_generation_config"] or {})
    return EngineArgs(**{**given, "model": model if model is not None else demo_model_path()})
