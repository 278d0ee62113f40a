"""What is asked of the process that renders conversations, and what it answers (`engine.frontend.helpers`).

All work on messages is done there, in `render_question`: their number and size are a caller's, so checking them takes
time, too. This side only encodes.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import msgspec

from engine.errors import TOO_LONG, InvalidRequestError
from engine.limits import Limits

MAKE = "engine.frontend.conversation:renderer"
ChatMessage = dict[str, Any]
"""{"role": …, "content": str | list of {"type": "text", "text": …}, …} as in OpenAI's API; templates may read further
keys"""

_FREE_BYTES = 1 << 20
"""of a question, which it may have whatever the context holds"""
_CHARACTER_BYTES = 4
RESERVED = ("messages", "tools", "add_generation_prompt")
"""variables of a template that have parameters of their own"""


class RenderQuestion(msgspec.Struct, frozen=True, kw_only=True):
    template: str
    blamed: str
    """the field to name where it is not clear whether the template or the messages are at fault"""
    messages: list[dict[str, Any]]
    tools: list[dict[str, Any]] | None
    add_generation_prompt: bool
    continue_final_message: bool
    special_tokens: dict[str, Any]
    chat_template_kwargs: dict[str, Any]
    max_chars: int
    limits: Limits


class RenderAnswer(msgspec.Struct, frozen=True, kw_only=True):
    """`text`, or why there is none."""

    text: str | None = None
    error: str = ""
    field: str | None = None
    code: str | None = None


def question(
    messages: Sequence[ChatMessage],
    *,
    template: str,
    blamed: str,
    tools: Sequence[Mapping[str, Any]] | None,
    template_kwargs: Mapping[str, Any] | None,
    special_tokens: Mapping[str, Any],
    add_generation_prompt: bool,
    continue_final_message: bool,
    max_chars: int,
    limits: Limits,
) -> bytes:
    """Encoded. `max_chars`: of the text. Raises `InvalidRequestError` for what is no list, or too much."""
    given: dict[str, Any] = {
        "messages": _listed(messages, "messages"),
        "tools": _listed(tools, "tools") if tools is not None else None,
        "chat_template_kwargs": {} if template_kwargs is None else template_kwargs,
    }
    if not given["messages"]:
        raise InvalidRequestError("messages must hold at least one message", "messages")
    for field in ("messages", "tools"):
        limits.check(field, len(given[field] or ()), field)
    _check_kwargs(given["chat_template_kwargs"])
    rest = {
        "template": template,
        "blamed": blamed,
        "special_tokens": special_tokens,
        "add_generation_prompt": add_generation_prompt,
        "continue_final_message": continue_final_message,
        "max_chars": max_chars,
        "limits": limits,
    }
    try:
        encoded = _encode({**rest, **given, "tools": given["tools"] or None})
    except Exception:
        for field, value in given.items():
            _encode_field(field, value)
        raise
    room = max(_FREE_BYTES, _CHARACTER_BYTES * max_chars) + len(template) * _CHARACTER_BYTES
    if len(encoded) > room:
        raise InvalidRequestError(
            f"messages and tools take {len(encoded)} bytes; what is rendered of them may have {max_chars} characters "
            f"(--limit template_output_factor={limits.template_output_factor})",
            "messages",
            TOO_LONG,
        )
    return encoded


def _listed(value: object, field: str) -> Sequence[Any]:
    if isinstance(value, (str, bytes, Mapping)) or not isinstance(value, Sequence):
        raise InvalidRequestError(f"{field} must be a list of objects, got {type(value).__name__}", field)
    return value


def _check_kwargs(kwargs: object) -> None:
    field = "chat_template_kwargs"
    if not isinstance(kwargs, Mapping):
        raise InvalidRequestError(f"{field} must be an object, got {type(kwargs).__name__}", field)
    for name in RESERVED:
        if name in kwargs:
            raise InvalidRequestError(f"{field} cannot hold {name!r}, which has a parameter of its own", field)


def _encode(value: object) -> bytes:
    return msgspec.msgpack.encode(value, enc_hook=_shown)


def _encode_field(field: str, value: object) -> None:
    """Raises `InvalidRequestError` where it cannot be encoded."""
    try:
        _encode(value)
    except UnicodeEncodeError as error:
        reason = f"the character {error.object[error.start]!a} is half of a surrogate pair"
        raise InvalidRequestError(f"{field}: {reason}", field) from None
    except RecursionError:
        raise InvalidRequestError(f"{field}: nested too deep", field) from None
    except Exception as error:
        raise InvalidRequestError(f"{field}: {error}", field) from None


def _shown(value: object) -> object:
    """What a template sees of an object that is none of JSON's: the name of its type."""
    return str.__str__(value) if isinstance(value, str) else f"<{type(value).__name__}>"


def renderer(setup: bytes) -> Callable[[bytes], bytes]:
    """Of the helper process. `setup`: not used."""
    import engine.frontend.chat_template  # noqa: F401  # before the first question

    decoder = msgspec.msgpack.Decoder(RenderQuestion)

    def answer(question: bytes) -> bytes:
        try:
            asked = decoder.decode(question)
        except msgspec.ValidationError as error:
            field = _field_of(str(error))
            return msgspec.msgpack.encode(RenderAnswer(error=f"{field}: {error}", field=field))
        try:
            return msgspec.msgpack.encode(RenderAnswer(text=render_question(asked)))
        except InvalidRequestError as error:
            refusal = RenderAnswer(error=str(error), field=error.field, code=error.code)
        except UnicodeError:
            refusal = RenderAnswer(error="the chat template writes half of a surrogate pair", field=asked.blamed)
        except RecursionError:
            refusal = RenderAnswer(error="rendering the messages nests too deep", field=asked.blamed)
        except MemoryError:
            error_text = asked.limits.message("template_bytes", field=asked.blamed)
            refusal = RenderAnswer(error=error_text, field=asked.blamed)
        return msgspec.msgpack.encode(refusal)

    return answer


def render_question(question: RenderQuestion) -> str:
    """Raises `InvalidRequestError` for whatever the template does, and MemoryError or RecursionError."""
    import jinja2

    from engine.frontend.chat_template import TooLongError, render
    from engine.frontend.messages import plain_messages
    from engine.frontend.told_tools import knows_tools, told

    given = (question.messages, question.tools, question.chat_template_kwargs)
    for field, value in zip(("messages", "tools", "chat_template_kwargs"), given, strict=True):
        _check_depth(value, field, question.limits)
    try:
        messages, tools = plain_messages(question.messages, question.template, question.limits), question.tools
        if not knows_tools(question.template):
            messages, tools = told(messages, tools), None
        return render(
            question.template,
            messages,
            tools=tools,
            add_generation_prompt=question.add_generation_prompt,
            continue_final_message=question.continue_final_message,
            variables={**question.special_tokens, **question.chat_template_kwargs},
            max_chars=question.max_chars,
        )
    except (InvalidRequestError, MemoryError, RecursionError):
        raise
    except TooLongError:
        raise InvalidRequestError(
            f"the rendered messages exceed {question.max_chars} characters; fewer fit into the context "
            f"(--limit template_output_factor={question.limits.template_output_factor})",
            question.blamed,
            TOO_LONG,
        ) from None
    except jinja2.TemplateSyntaxError as error:
        raise InvalidRequestError(f"the chat template does not parse: {error}", "chat_template") from error
    except Exception as error:  # a template is a program
        raise InvalidRequestError(f"the chat template refuses these messages: {error}", "messages") from error


def _check_depth(value: object, field: str, limits: Limits) -> None:
    """Level by level: what is deep has no need of a deep stack."""
    level, depth = [value], 0
    while level:
        level = [
            inner
            for outer in level
            if isinstance(outer, (dict, list))
            for inner in (outer.values() if isinstance(outer, dict) else outer)
        ]
        depth += 1
        if depth > limits.json_depth + 1:
            limits.refuse("json_depth", field=field)


def _field_of(message: str) -> str:
    """msgspec's messages end in where it was: "… - at `$.messages[0]`"."""
    _, _, path = message.rpartition("`$.")
    name = path.partition("[")[0].rstrip("`").partition(".")[0]
    return name if name in ("messages", "tools", "chat_template_kwargs") else "messages"
