"""What a dialect is: how a family of models marks its thinking and its calls in plain text."""

from __future__ import annotations

from typing import Any, Literal

import msgspec


class Tagged(msgspec.Struct, frozen=True):
    """Arguments one by one, in the schema's order. `item`: one of them, with {key}, {value} and {text} (whether it is
    one: true, false). `texts`: they stand between quotes, or as JSON, or raw up to what follows them in `item`."""

    item: str
    joined: str = ""
    texts: Literal["raw", "json"] | tuple[str] = "raw"
    python: bool = False
    """True, False and None, not JSON's; texts may stand in single quotes"""
    nested: str | None = None
    """a key and its value within an object; None: objects and lists are JSON"""
    in_order: bool = False
    """of the alphabet, not the schema's"""


class CallForm(msgspec.Struct, frozen=True, kw_only=True):
    """How calls are written: what required ones are held to. {n} stands for a number, {id} for letters and digits,
    {and_id} for a further key with an id, or nothing, {s} for whitespace that checkpoints have differently."""

    begin: str = ""
    """once, before the first call"""
    call: tuple[str, str, str]
    """before a name, between it and the arguments, behind them"""
    between: str = ""
    end: str = ""
    arguments: Tagged | None = None
    """None: one JSON object"""
    parallel: bool = True
    """several in one answer"""


class Dialect(msgspec.Struct, frozen=True, kw_only=True):
    """`fields`: those of the response template (transformers' `utils.chat_parsing`) that are its own. Regions called
    "tool_calls" hold calls, "response" and "content" the answer, "reasoning" thinking, "nothing" nothing."""

    name: str
    fields: dict[str, dict[str, Any]] = {}
    form: CallForm | None = None
    """None: only what the model itself writes is understood"""
    thinking: tuple[str, str] | None = ("<think>", "</think>")
    """before and behind it"""
    opens: str | None = None
    """a mark that thinking begins with where `thinking` is None: its end is `closes`, which says what comes next"""
    closes: tuple[str, str] = ("", "")
    """before an answer, and before calls"""
    known_by: tuple[str, ...] = ()
    """a chat template that holds all of these is of this dialect"""
    also_by: tuple[str, ...] = ()
    """so is one that holds any of these"""
    call_ids: Literal["random", "nine", "own"] = "random"
    """"nine": letters and digits, which Mistral's templates insist on; "own": the model writes them"""


class Call(msgspec.Struct, frozen=True):
    """`arguments`: JSON text, or the beginning of one where the answer was cut within it (`complete` false)."""

    id: str
    name: str
    arguments: str
    complete: bool = True


class Piece(msgspec.Struct, frozen=True):
    """A part of an answer, as it comes: one of the four."""

    content: str = ""
    reasoning: str = ""
    call: Call | None = None
    """whole, or without arguments, which follow"""
    arguments: str = ""
    """more of the text of the last call's"""
