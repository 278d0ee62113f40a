"""Settings as command-line options: for the doors, and for scripts as vLLM's examples are. Nothing heavy: --help is
instant.

An option that is None was not set: then the setting's own default holds.
"""

from __future__ import annotations

import argparse
import json
from types import NoneType, UnionType
from typing import (
    TYPE_CHECKING,
    Annotated,
    Any,
    Literal,
    NoReturn,
    TypeVar,
    Union,
    get_args,
    get_origin,
    get_type_hints,
)

if TYPE_CHECKING:
    import msgspec

Parser = argparse._ActionsContainer
"""a parser, or a group of its options"""
P = TypeVar("P", bound=Parser)


class FlexibleArgumentParser(argparse.ArgumentParser):
    """vLLM's, and every door's: options may be written with underscores, --max_model_len for --max-model-len; none is
    abbreviated, so that one that is not known is never taken for another."""

    def __init__(self, *args: Any, **settings: Any) -> None:
        super().__init__(*args, **{"allow_abbrev": False, **settings})

    def parse_known_args(self, args: Any = None, namespace: Any = None) -> Any:
        import sys

        given = sys.argv[1:] if args is None else list(args)
        end = given.index("--") if "--" in given else len(given)
        return super().parse_known_args([*map(_dashed, given[:end]), *given[end:]], namespace)

    def error(self, message: str) -> NoReturn:
        """With what may have been meant, and without the list of all options, behind which it would not be seen."""
        from difflib import get_close_matches

        known = _flags(self)
        unknown = [_dashed(word).partition("=")[0].rstrip(":,") for word in message.split() if word.startswith("--")]
        near = [
            flag for word in unknown if word not in known for flag in get_close_matches(word, known, n=2, cutoff=0.7)
        ]
        hint = f" (did you mean {' or '.join(near)}?)" if near else ""
        self.exit(2, f"{self.prog}: error: {message}{hint}; {self.prog} --help lists the options\n")


def _flags(parser: argparse.ArgumentParser) -> list[str]:
    """Of it, and of its commands."""
    found = [flag for flag in parser._option_string_actions if flag.startswith("--")]
    for action in parser._actions:
        if isinstance(action, argparse._SubParsersAction):
            found += [flag for each in dict.fromkeys(action.choices.values()) for flag in _flags(each)]
    return found


def _dashed(text: str) -> str:
    name, equals, value = text.partition("=")
    return name.replace("_", "-") + equals + value if name.startswith("--") else text


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
            f"cannot read {text[:100]!r} as a JSON object; write it as '{{\"FIELD\": VALUE}}'"
        )
    return value


def core_list(text: str) -> tuple[int, ...]:
    """'0,2-4' → (0, 2, 3, 4)."""
    try:
        ranges = [part.split("-") for part in text.split(",")]
        return tuple(core for first, *last in ranges for core in range(int(first), int((last or [first])[-1]) + 1))
    except ValueError:
        raise argparse.ArgumentTypeError(f"cannot read {text!r} as a list of CPUs; write 0,1 or 0-3") from None


def add_options(parser: Parser, settings: type[msgspec.Struct], prefix: str) -> None:
    """One option for each field of `settings`. Names follow vLLM's where it has the option. `prefix`: of the
    attributes that hold what vLLM's other names were given."""
    import msgspec  # not at the top: --help is instant

    from engine.vllm_names import SHORT

    group = parser.add_argument_group("engine") if isinstance(parser, argparse.ArgumentParser) else parser
    hints = get_type_hints(settings, include_extras=True)
    for field in msgspec.structs.fields(settings):
        kind, about = hints[field.name], msgspec.Meta()
        if get_origin(kind) is Annotated:
            kind, about = get_args(kind)
        how = about.extra or {}
        if not how.get("hidden"):
            names = str(how.get("flag", field.name)).split()
            flags = [*SHORT.get(field.name, "").split(), *("--" + name.replace("_", "-") for name in names)]
            option = _option_of(kind, bool(how.get("size")), field.name)
            group.add_argument(*flags, dest=field.name, help=(about.description or "").replace("%", "%%"), **option)
    _add_vllms_options(parser, prefix)


def _add_vllms_options(parser: Parser, prefix: str) -> None:
    """Those that mean the same under another name here, and those that are refused with what to use instead."""
    from engine.vllm_names import SHORT, VLLMS_NAMES

    for name in VLLMS_NAMES:
        flag = "--" + name.replace("_", "-")
        flags = [SHORT[name], flag] if name in SHORT else [flag]
        if flag not in parser._option_string_actions:
            parser.add_argument(
                *flags, dest=prefix + name, nargs="?", type=_plain_value, const=True, help=argparse.SUPPRESS
            )


def _plain_value(text: str) -> object:
    """'1' → 1, 'true' → True, 'auto' → 'auto'."""
    try:
        return json.loads(text)
    except ValueError:
        return text


def _option_of(kind: Any, is_size: bool, name: str) -> dict[str, Any]:
    """argparse's settings for a type. The default is None."""
    kinds = [one for one in get_args(kind) if one is not NoneType] if get_origin(kind) in (Union, UnionType) else [kind]
    first = kinds[0]
    if is_size:
        return {"type": size_bytes, "metavar": "SIZE"}
    if get_origin(first) is Literal:
        from engine.vllm_names import renamed

        return {"type": lambda text: renamed(text, name), "choices": list(get_args(first))}
    if first is bool:
        return {"action": argparse.BooleanOptionalAction}
    if first in (int, float, str):
        return {"type": first}
    if get_origin(first) is tuple:
        return {"type": core_list, "metavar": "LIST"}
    if get_origin(first) is dict:
        return {"type": json_object, "metavar": "JSON"}
    return {"action": "append", "metavar": "NAME=VALUE"}
