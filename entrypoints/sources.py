"""Options of a door that do not stand on its command line: in a file (`--config`), and in the environment.

The command line comes before the environment (`PAGELOOM_MAX_MODEL_LEN` for `--max-model-len`), that before the file,
and that before the defaults. Options that may be given several times are joined. Everything becomes arguments that the
parser reads as any others, so what is wrong is told in the same words.
"""

from __future__ import annotations

import argparse
import difflib
import json
import re
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

PREFIX = "PAGELOOM_"
_OTHERS = frozenset({"config", "help", "version"})
_MOST_BYTES = 1024 * 1024
_NEARLY = 0.85


def add_config(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--config",
        type=Path,
        metavar="FILE",
        help="options as YAML, as `max-model-len: 4096`, and `model`; the environment (PAGELOOM_MAX_MODEL_LEN=4096) "
        "comes before it, and the command line before both",
    )


class Given(NamedTuple):
    """All that options were made of: another process makes the same of it, whatever has become of the sources."""

    command_line: list[str]
    elsewhere: list[str]
    """as arguments, which the command line comes before"""
    model: str | None
    """where the command line names none"""


def parse_all(parser: argparse.ArgumentParser, given: Sequence[str], environment: Mapping[str, str]) -> Any:
    """The parser's namespace; `given`: the command line. What is wrong ends the program as the parser does. The
    namespace's `sources` is where each option stands that is not on the command line, `given` all of them."""
    finder = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    finder.add_argument("--config", type=Path)
    file = finder.parse_known_args(given)[0].config
    values, variables = {} if file is None else _read(parser, file), _of(parser, environment)
    model = [each.pop("model") for each in (variables, values) if each.get("model") is not None]
    settings = [_setting(parser, f"{file}: {name}", name, value) for name, value in values.items()]
    settings += [_setting(parser, _variable(name), name, value) for name, value in variables.items()]
    _check(parser, settings)
    arguments = [text for each in settings for text in each.arguments]
    options = parse_again(parser, Given(list(given), arguments, str(model[0]) if model else None))
    written = {text.split("=")[0] for text in given}
    kept = [each for each in settings if not written.intersection(each.action.option_strings)]
    options.sources = {name: each.place for each in kept for name in _names(each.action)}
    return options


def parse_again(parser: argparse.ArgumentParser, given: Given) -> Any:
    """The namespace, without its `sources`."""
    # Two parses: what the command line begins with is no further value of what stands before it.
    options = parser.parse_args(given.command_line, parser.parse_args(given.elsewhere))
    options.given = given
    if given.model is not None and options.model is None:
        options.model = given.model
    return options


def told(error: Exception, options: argparse.Namespace) -> str:
    """What is wrong with a setting that it begins with, behind where that stands if not on the command line."""
    text = str(error)
    first = re.match(r"(--)?([a-z0-9_-]+)", text)
    place = options.sources.get(first[2].replace("-", "_")) if first else None
    if first is None or place is None:
        return text
    return f"{place}{text[first.end() :]}" if text[first.end() :].startswith(":") else f"{place}: {text}"


class _Setting(NamedTuple):
    action: argparse.Action
    place: str
    """where it stands"""
    arguments: list[str]


def _check(parser: argparse.ArgumentParser, settings: Sequence[_Setting]) -> None:
    """Ends the program where one of them is wrong, and says where that stands."""
    exits, parser.exit_on_error = parser.exit_on_error, False
    try:
        parser.parse_args([text for each in settings for text in each.arguments])
    except argparse.ArgumentError as error:
        for each in settings:
            _parse_alone(parser, each)
        parser.error(str(error))  # each is right, but not beside the others
    finally:
        parser.exit_on_error = exits


def _parse_alone(parser: argparse.ArgumentParser, setting: _Setting) -> None:
    try:
        parser.parse_args(setting.arguments)
    except argparse.ArgumentError as error:
        parser.error(f"{setting.place}: {error.message}")


def _read(parser: argparse.ArgumentParser, file: Path) -> dict[str, Any]:
    import yaml

    try:
        text = file.read_text(encoding="utf-8")
        found = _loaded(text) if len(text) <= _MOST_BYTES else None
    except (OSError, UnicodeDecodeError, yaml.YAMLError, RecursionError) as error:
        parser.error(f"--config: cannot read {file}: {' '.join(str(error).split())}")
    if found is None and len(text) <= _MOST_BYTES:  # nothing, or comments alone
        return {}
    if not isinstance(found, dict) or not all(isinstance(name, str) for name in found):
        parser.error(f"--config: {file} must hold names of options, each with its value")
    values: dict[str, Any] = {}
    for written, value in found.items():
        name = _plain(written)
        if name in values:
            both = " and ".join(each for each in found if _plain(each) == name)
            parser.error(f"{file}: {name} stands twice, as {both}: leave one out")
        values[name] = value
    return values


def _plain(name: str) -> str:
    return name.replace("_", "-").removeprefix("--")


def _loaded(text: str) -> Any:
    """YAML, of which the library would take the last value of a key that stands twice. Raises `YAMLError`."""
    import yaml

    class Loader(yaml.SafeLoader):
        def construct_mapping(self, node: Any, deep: bool = False) -> Any:
            lines: dict[str, int] = {}
            for key, _ in node.value if isinstance(node, yaml.MappingNode) else ():
                if isinstance(key, yaml.ScalarNode):
                    line = key.start_mark.line + 1
                    if key.value in lines:
                        raise yaml.YAMLError(f"{key.value} stands twice, in lines {lines[key.value]} and {line}")
                    lines[key.value] = line
            return super().construct_mapping(node, deep)

    loader = Loader(text)
    try:
        return loader.get_single_data()
    finally:
        loader.dispose()


def _of(parser: argparse.ArgumentParser, environment: Mapping[str, str]) -> dict[str, Any]:
    """Variables that are named like an option and say something. Others are not ours: of a service that is called
    pageloom, Kubernetes tells every container PAGELOOM_PORT=tcp://… and the like. One that is nearly named like an
    option is told of."""
    found: dict[str, Any] = {}
    for variable, text in sorted(environment.items()):
        name = variable.removeprefix(PREFIX).lower().replace("_", "-")
        if not variable.startswith(PREFIX) or not text or "://" in text[:6]:
            continue
        if _action(parser, name) is not None:
            found[name] = text
        elif close := _close(parser, name, _NEARLY):
            print(f"{variable} is no option; is it {_variable(close)}?", file=sys.stderr)
    found.pop("api-key", None)  # who takes it removes it, too
    return found


def _action(parser: argparse.ArgumentParser, name: str) -> argparse.Action | None:
    return None if name in _OTHERS else parser._option_string_actions.get(f"--{name}")


def _close(parser: argparse.ArgumentParser, name: str, ratio: float = 0.6) -> str:
    """The option that is spelled most alike, or nothing."""
    known = [option[2:] for option in parser._option_string_actions if option.startswith("--")]
    return next(iter(difflib.get_close_matches(name, known, 1, ratio)), "")


def _names(action: argparse.Action) -> set[str]:
    """Under which messages know an option."""
    flags = [each[2:].replace("-", "_") for each in action.option_strings if each.startswith("--")]
    return {action.dest, *flags}


def _variable(name: str) -> str:
    return PREFIX + name.upper().replace("-", "_")


def _setting(parser: argparse.ArgumentParser, place: str, name: str, value: Any) -> _Setting:
    action = _action(parser, name)
    if action is None:
        if name in _OTHERS:
            parser.error(f"{place}: stands on the command line alone")
        close = _close(parser, name)
        parser.error(f"{place}: there is no such option" + (f"; is it {close}?" if close else ""))
    return _Setting(action, place, [] if value is None else _spelled(parser, action, name, value, place))


def _spelled(parser: argparse.ArgumentParser, action: argparse.Action, name: str, value: Any, place: str) -> list[str]:
    if action.nargs == 0:
        wanted = _truth(value)
        if wanted is None:
            parser.error(f"{place}: must be true or false, got {value!r}")
        if wanted:
            return [f"--{name}"]
        return [f"--no-{name}"] if isinstance(action, argparse.BooleanOptionalAction) else []
    several = value if isinstance(value, list) else [value]
    texts = [each if isinstance(each, str) else json.dumps(each) for each in several]
    if action.nargs in ("*", "+"):
        return [f"--{name}", *texts]
    if isinstance(value, list) and not isinstance(action, argparse._AppendAction):
        texts = [json.dumps(value)]
    return [f"--{name}={text}" for text in texts]


def _truth(value: Any) -> bool | None:
    if isinstance(value, bool):
        return value
    return {"true": True, "1": True, "yes": True, "false": False, "0": False, "no": False}.get(str(value).lower())
