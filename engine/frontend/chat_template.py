"""Chat templates rendered as transformers renders them, without transformers (whose import costs seconds and memory).

Templates come with a model and are programs: they run in jinja2's sandbox, see plain JSON data only, and their output
is text. What templates rely on beyond jinja2 itself: `tojson` without HTML escapes, `raise_exception`, `strftime_now`,
loop controls, and `{% generation %}` blocks, which mark the assistant's text for training and change no output.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from datetime import datetime
from functools import lru_cache
from typing import TYPE_CHECKING, Any

import jinja2
import jinja2.ext
import jinja2.nodes
from jinja2.sandbox import ImmutableSandboxedEnvironment

if TYPE_CHECKING:
    from jinja2.parser import Parser

_CACHED_TEMPLATES = 32
_MARK = "\ue000continue-here\ue001"
"""put behind a message that is to be continued, to be found again in the text; private-use characters"""
_REASONING_NAMES = ("reasoning_content", "thinking", "reasoning")
"""under which clients send a model's reasoning; templates read the first, some the second"""


class _GenerationBlock(jinja2.ext.Extension):
    """`{% generation %}…{% endgeneration %}` stands for what is inside."""

    tags = {"generation"}  # noqa: RUF012 (jinja2 wants it so)

    def parse(self, parser: Parser) -> jinja2.nodes.Node | list[jinja2.nodes.Node]:
        line = next(parser.stream).lineno
        inside = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return jinja2.nodes.Scope(inside, lineno=line)


class _Namespace(jinja2.utils.Namespace):
    """A template may keep values in it, but none under a name that Python gives a meaning."""

    def __init__(self, /, *args: Any, **kwargs: Any) -> None:
        values = dict(*args, **kwargs)
        for name in values:
            _refuse_private(name)
        super().__init__(values)

    def __setitem__(self, name: str, value: object) -> None:
        _refuse_private(name)
        super().__setitem__(name, value)


def _refuse_private(name: object) -> None:
    if isinstance(name, str) and name.startswith("_"):
        raise jinja2.exceptions.SecurityError(f"a namespace of a chat template cannot hold {name!r}")


class TooLongError(Exception):
    """The text exceeds what it may have."""


def render(
    template: str,
    messages: Sequence[Mapping[str, Any]],
    *,
    tools: Sequence[Mapping[str, Any]] | None,
    add_generation_prompt: bool,
    continue_final_message: bool,
    variables: Mapping[str, Any],
    max_chars: int | None = None,
) -> str:
    """The prompt text. `variables`: what else the template may read (special tokens, the request's own).

    Raises `TooLongError`, `jinja2.TemplateError`, ValueError, TypeError and the like: whatever the template does.
    """
    # A key without a value is left out: templates ask whether a key is there, clients send null.
    present = [{key: item for key, item in message.items() if item is not None} for message in messages]
    chat = [_with_reasoning(_plain(message)) for message in present]
    if continue_final_message:
        chat[-1] = _marked(chat[-1], template)
    given = {"messages": chat, "tools": _plain(tools), "add_generation_prompt": add_generation_prompt}
    pieces, chars = [], 0
    for piece in parsed(template).generate({"documents": None, **_plain(variables), **given}):
        pieces.append(piece)
        chars += len(piece)
        if max_chars is not None and chars > max_chars:
            raise TooLongError
    text = "".join(pieces)
    return _cut_at_mark(text) if continue_final_message else text


@lru_cache(_CACHED_TEMPLATES)
def parsed(template: str) -> jinja2.Template:
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[_GenerationBlock, jinja2.ext.loopcontrols]
    )
    environment.filters["tojson"] = _to_json
    environment.globals.update(
        raise_exception=_raise_exception, strftime_now=_now, namespace=_Namespace, dict=_new_dict
    )
    return environment.from_string(template)


def _to_json(
    value: object,
    ensure_ascii: bool = False,
    indent: int | str | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def _raise_exception(message: str) -> None:
    raise jinja2.TemplateError(message)


def _now(pattern: str) -> str:
    return datetime.now().strftime(pattern)


def _new_dict(*args: Any, **kwargs: Any) -> dict[str, Any]:
    """Not the class itself, whose attributes a template could reach."""
    return dict(*args, **kwargs)


def _plain(value: Any) -> Any:
    """Rebuilt of JSON's types; an object of any other is shown by its type's name."""
    if value is None or isinstance(value, bool):
        return value
    for kind in (str, int, float):
        if isinstance(value, kind):
            return kind(value) if type(value) is not kind else value
    if isinstance(value, Mapping):
        return {_plain(key): _plain(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return type(value)(map(_plain, value)) if type(value) in (list, tuple) else [_plain(item) for item in value]
    return f"<{type(value).__name__}>"


def _with_reasoning(message: dict[str, Any]) -> dict[str, Any]:
    known = [message[name] for name in _REASONING_NAMES if message.get(name) is not None]
    if not known:
        return message
    return {"thinking": known[0], **message, "reasoning_content": known[0]}


def _marked(message: dict[str, Any], template: str) -> dict[str, Any]:
    content = message.get("content")
    if content is None:
        raise ValueError("continue_final_message is set, but the last message has no content to continue")
    if "content" not in template:
        raise ValueError("continue_final_message is set, but the chat template shows no message's content")
    return {**message, "content": f"{content}{_MARK} "}


def _cut_at_mark(text: str) -> str:
    """Up to the mark, which the template may have trimmed together with the spaces before it."""
    head, mark, tail = text.rpartition(_MARK)
    if not mark:
        raise ValueError("continue_final_message is set, but the chat template does not show the last message as it is")
    return head if tail.startswith(" ") else head.rstrip()
