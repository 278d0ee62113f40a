"""Command-line options shared by the doors, and how they become `EngineArgs`. Nothing heavy: --help is instant.

An option that is None was not set: then the setting's own default holds.
"""

from __future__ import annotations

import argparse
import json
import os
from collections.abc import Iterable
from pathlib import Path
from types import NoneType, UnionType
from typing import TYPE_CHECKING, Annotated, Any, Literal, Union, get_args, get_origin, get_type_hints

if TYPE_CHECKING:
    from engine.config import EngineArgs


def size_bytes(text: str) -> int:
    """'4GiB', '512M', '1000000' → bytes."""
    from engine.sizes import parse_size  # not at the top: --help is instant

    try:
        return parse_size(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from None


def json_object(text: str) -> dict[str, object]:
    """'{"top_p": 0.9}' → {"top_p": 0.9}."""
    try:
        value = json.loads(text)
    except (ValueError, RecursionError):
        value = None
    if not isinstance(value, dict):
        raise argparse.ArgumentTypeError(
            f"cannot read {text[:100]!r} as a JSON object; write for example '{{\"name\": 1}}'"
        )
    return value


def core_list(text: str) -> tuple[int, ...]:
    """'0,2-4' → (0, 2, 3, 4)."""
    try:
        ranges = [part.split("-") for part in text.split(",")]
        return tuple(core for first, *last in ranges for core in range(int(first), int((last or [first])[-1]) + 1))
    except ValueError:
        raise argparse.ArgumentTypeError(f"cannot read {text!r} as a list of CPUs; write 0,1 or 0-3") from None


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


def add_engine_options(parser: argparse.ArgumentParser) -> None:
    """One option for each setting of `EngineArgs`. Names follow vLLM's where it has the option."""
    import msgspec

    from engine.config import EngineArgs

    group = parser.add_argument_group("engine")
    hints = get_type_hints(EngineArgs, include_extras=True)
    for field in msgspec.structs.fields(EngineArgs):
        kind, about = hints[field.name], msgspec.Meta()
        if get_origin(kind) is Annotated:
            kind, about = get_args(kind)
        how = about.extra or {}
        if not how.get("hidden"):
            flag = "--" + str(how.get("flag", field.name)).replace("_", "-")
            settings = _option_of(kind, field.default, bool(how.get("size")))
            group.add_argument(flag, dest=field.name, help=(about.description or "").replace("%", "%%"), **settings)
    _add_vllms_options(parser)


def _add_vllms_options(parser: argparse.ArgumentParser) -> None:
    """Those that mean the same under another name here, and those that are refused with what to use instead."""
    from engine.vllm_names import VLLMS_NAMES

    for name in VLLMS_NAMES:
        flag = "--" + name.replace("_", "-")
        if flag not in parser._option_string_actions:
            parser.add_argument(
                flag, dest=f"vllms_{name}", nargs="?", type=_plain_value, const=True, help=argparse.SUPPRESS
            )


def _plain_value(text: str) -> object:
    """'1' → 1, 'true' → True, 'auto' → 'auto'."""
    try:
        return json.loads(text)
    except ValueError:
        return text


def _option_of(kind: Any, default: Any, is_size: bool) -> dict[str, Any]:
    """argparse's settings for a type. Options without a default of their own are None where they are not set."""
    kinds = [one for one in get_args(kind) if one is not NoneType] if get_origin(kind) in (Union, UnionType) else [kind]
    first = kinds[0]
    if is_size:
        return {"type": size_bytes, "metavar": "SIZE", "default": default}
    if get_origin(first) is Literal:
        return {"choices": list(get_args(first)), "default": default}
    if first is bool:
        return {"action": argparse.BooleanOptionalAction, "default": default}
    if first in (int, float, str):
        return {"type": first, "default": default}
    if get_origin(first) is tuple:
        return {"type": core_list, "metavar": "LIST"}
    if get_origin(first) is dict:
        return {"type": json_object, "metavar": "JSON", "default": {}}
    return {"action": "append", "metavar": "NAME=VALUE", "default": []}


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
