"""An answer's text, as it comes, taken apart into content, thinking and calls.

transformers' `ResponseParser` finds the regions; what is given out comes from its events, so that an answer is the same
whole, token by token or in any other pieces. Whitespace beside a region's marks belongs to the marks; inside of the
content it stays.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Any, NamedTuple

from msgspec.structs import replace
from transformers.utils.chat_parsing import ResponseParser
from transformers.utils.chat_parsing.response_templates import ResponseTemplateField, load_response_template

from engine.dialects.arguments import CallScanner
from engine.dialects.bodies import calls_of, json_or_none, new_id
from engine.dialects.fields import NAMED, WHOLE
from engine.dialects.forms import Call, Dialect, Piece
from engine.dialects.plain_text import Template
from engine.dialects.schemas import as_declared, kinds_of, typed

logger = logging.getLogger(__name__)

_NEVER = "\0never\0"
"""an anchor that no prompt holds: what is given as its prefix is all there is"""
_KEPT_CHARS = 256
"""of what has been parsed, for patterns that look behind"""
_CUT_CHARS = 4096
_PIECE_CHARS = 256
_TAGS = ("<", "[")
"""that marks of calls begin with where they are not JSON's own"""
_LEAST_MARK = 6
"""characters of a mark that tell it from what is compared or indexed"""
_JSON_TEXT = re.compile(r'"[^"\\]*+(?:\\.[^"\\]*+)*+"', re.DOTALL)


def response_template(dialect: Dialect, *, with_calls: bool) -> Template:
    """transformers' form of it. Raises ValueError."""
    fields: dict[str, Any] = {}
    if dialect.thinking is not None:
        fields["reasoning"] = {"open": dialect.thinking[0], "close": dialect.thinking[1], "repeats": True}
    fields |= {name: spec for name, spec in dialect.fields.items() if with_calls or name != "tool_calls"}
    implicit = any("open" not in spec and "open_pattern" not in spec for spec in fields.values())
    rest: dict[str, Any] = {} if implicit else {"content": {}}
    anchor = {"start_anchor": _NEVER}
    return Template(load_response_template({**anchor, "fields": {**rest, **fields}}))


class _Parser(ResponseParser):
    """The library's, which keeps all of an answer to look into it again, and takes any mark for one: here what has been
    parsed is let go of, a mark within a text of JSON or within an argument is a part of that, and events hold the marks
    that they stand for."""

    _buffer: str
    _pos: int
    _body: str
    _mark: str = ""

    def __init__(self, template: Template, prefix: str, tools: list[dict[str, Any]]) -> None:
        self._template = template
        super().__init__(template.spec, prefix=prefix, tools=list(tools))

    def passes(self, text: str) -> str | None:
        """In which region `text` goes on where it cannot be anything else: it has been taken then. None: feed it."""
        region: str | None = self._current
        if not self._opened or region not in self._template.texts or self._pos != len(self._buffer):
            return None
        if not self._template.is_plain(region, self._watchlist, text):
            return None
        buffer, self._buffer = self._buffer, ""  # which has no other name then, so that it grows where it is
        buffer += text
        self._buffer, self._pos = buffer, len(buffer)
        self._cut()
        return region

    def _cut(self) -> None:
        if self._pos > _CUT_CHARS:
            cut = self._pos - _KEPT_CHARS
            self._buffer, self._pos = self._buffer[cut:], self._pos - cut

    def _accumulate(self, events: list[dict[str, Any]], text: str) -> None:
        super()._accumulate(events, text)
        if self._current in self._template.texts:
            self._body = ""  # events have it, and nobody asks for the whole

    def feed(self, text: str) -> list[dict[str, Any]]:
        events: list[dict[str, Any]] = []
        for start in range(0, len(text), _PIECE_CHARS):  # all that is there is searched again for each region
            events += super().feed(text[start : start + _PIECE_CHARS])
            self._cut()
        return events

    def ends_within(self) -> bool:
        """A call of tagged arguments has not been closed."""
        field = self._spec.fields.get(self._current or "")
        return field is not None and field.name == "tool_calls" and field.content == "xml-inline"

    def drop_cut_mark(self, least: int) -> None:
        """What is held, since it may become a mark of calls, is the beginning of one, if it has `least` characters."""
        held = self._buffer[self._pos :]
        if self._current != "tool_calls" and len(held) >= least and held[0] in _TAGS:
            self._buffer = self._buffer[: self._pos]

    def _scan(self, watch: Any, eos: bool) -> Any:
        best, hold = super()._scan(watch, eos)
        if best is None or best[0] != "close":
            return best, hold
        _, field, found = best
        while field.name == "tool_calls" and _is_within(field, self._body + self._buffer[self._pos : found.start()]):
            after = max(found.end(), found.start() + 1)
            found = field.close_re.search(self._buffer, after, partial=not eos)
            if found is None:
                return None, len(self._buffer)
            if not eos and (found.partial or self._can_grow("close", field, found)):
                return None, found.start()
        self._mark = found.group()
        return ("close", field, found), hold

    def _open_explicit(self, events: list[dict[str, Any]], field: ResponseTemplateField, m: Any) -> None:
        super()._open_explicit(events, field, m)
        events[-1] |= {"mark": m.group(), "captures": self._captures}

    def _close_current(self, events: list[dict[str, Any]]) -> None:
        known = len(events)
        super()._close_current(events)
        if len(events) > known:
            events[-1]["mark"] = self._mark
        self._mark = ""


def _is_within(field: ResponseTemplateField, body: str) -> bool:
    """The end of `body` is inside of a text of JSON, or of an argument."""
    if field.content == "json":
        return not field.content_args.get("string_delims") and '"' in _JSON_TEXT.sub("", body)
    marks = field.content_args.get("argument")
    return marks is not None and body.rfind(marks[0]) > body.rfind(marks[1])


class _Text:
    """Text between marks: whitespace at its ends is held until it is known to stand inside."""

    def __init__(self) -> None:
        self._held = ""
        self._begun = False
        self.marked = False
        """there were marks: what is held when all has ended stood beside them"""

    def feed(self, text: str) -> str:
        if not self._begun and self.marked:
            text = text.lstrip()
        text = self._held + text
        self._held = ""
        if not self._begun and not text.strip():
            self._held = text
            return ""
        kept = text.rstrip()
        self._held = text[len(kept) :]
        self._begun = self._begun or bool(kept)
        return kept

    def mark(self) -> None:
        self.marked = True
        if not self._begun:
            self._held = ""

    def let_go(self) -> str:
        rest, self._held = self._held, ""
        return rest

    def end(self) -> str:
        rest = self.let_go()
        return "" if self.marked else rest


class AnswerReader:
    """One answer. `feed` what comes, `end` when nothing more does."""

    def __init__(
        self,
        dialect: Dialect,
        template: Template,
        *,
        thinks: bool = False,
        tools: Sequence[Mapping[str, Any]] = (),
        streamed: Collection[str] = (),
    ) -> None:
        """`template`: `response_template` of the dialect. `thinks`: the prompt has begun the thinking. `tools`: as
        chat templates take them; what schemas say about arguments that are written as bare text is followed.
        `streamed`: names of tools whose arguments are given out as they come, where they are JSON. Such a call cannot
        be taken back: what breaks off within it ends it, where it would have been content."""
        self._dialect = dialect
        self._parser: _Parser | None = _Parser(
            template,
            prefix=dialect.thinking[0] if thinks and dialect.thinking else "",
            tools=[typed(tool) for tool in tools],
        )
        self._kinds = {tool["function"]["name"]: kinds_of(tool) for tool in tools}
        calls = dialect.fields.get("tool_calls", {})
        self._holds_json = calls.get("content") == "json"
        self._named = _scanned_as(calls)
        self._streamed = streamed
        self._scanner: CallScanner | None = None
        self._given_id: str | None = None
        self._begun: list[_Begun] = []
        """of the region of calls that is being read"""
        self._content, self._reasoning = _Text(), _Text()
        self._reasoning.marked = True
        self._raw = ""
        """of the calls that are being read"""
        self._is_no_call = False
        """their mark names no tool"""
        self.num_calls = 0
        self._cut_off = self._cut = False
        for event in self._parser.initial_events:
            self._take(event)

    def feed(self, text: str) -> list[Piece]:
        if self._parser is None:
            return [Piece(content=text)] if text else []
        try:
            region = self._parser.passes(text)
            if region is not None:
                return self._text(region, text)
            return self._pieces(self._parser.feed(text))
        except Exception:
            return self._give_up(text)

    def end(self, *, cut: bool = False) -> list[Piece]:
        """`cut`: by a limit, not by the model. A call that is cut comes with what there is of its arguments."""
        pieces: list[Piece] = []
        self._cut = cut
        if self._parser is not None:
            if cut:
                self._parser.drop_cut_mark(1 if self.num_calls else _LEAST_MARK)
            self._cut_off = self._parser.ends_within()
            try:
                pieces = self._pieces(self._parser.finalize()[1])
            except Exception:
                pieces = self._give_up("")
        rest = self._content.end()
        return [*pieces, Piece(content=rest)] if rest else pieces

    def _give_up(self, text: str) -> list[Piece]:
        """A template of somebody else's that raises: all that follows is content, as it is."""
        logger.exception("the response template fails; the rest of an answer is given out as it is")
        self._parser = None
        raw = "" if any(each.shown for each in self._begun) else self._raw
        rest, self._raw = self._content.let_go() + raw + text, ""
        return [Piece(content=rest)] if rest else []

    def _pieces(self, events: Iterable[Mapping[str, Any]]) -> list[Piece]:
        return [piece for event in events for piece in self._take(event)]

    def _take(self, event: Mapping[str, Any]) -> list[Piece]:
        field, kind = event["field"], event["type"]
        if field == "tool_calls":
            return self._take_calls(event)
        if kind == "region_chunk" and field != "nothing":
            return self._text(field, event["text"])
        if field == "nothing":
            return self._take_nothing(event)
        if field != "content":
            self._content.mark()
        return []

    def _text(self, region: str, text: str) -> list[Piece]:
        if region == "reasoning":
            text = self._reasoning.feed(text)
            return [Piece(reasoning=text)] if text else []
        text = self._content.feed(text)
        return [Piece(content=text)] if text else []

    def _take_nothing(self, event: Mapping[str, Any]) -> list[Piece]:
        """It ends calls; where there were none it is a word."""
        if event["type"] != "region_open" or self.num_calls:
            return []
        return self._as_content(event["mark"])

    def _calls_of(self, value: Any) -> list[Call] | None:
        calls = calls_of(value, self._dialect, self.num_calls)
        if calls is None or self._holds_json:
            return calls
        kinds = [self._kinds.get(call.name, {}) for call in calls]
        return [replace(call, arguments=as_declared(call.arguments, each)) for call, each in zip(calls, kinds)]

    def _as_content(self, text: str) -> list[Piece]:
        shown = self._content.feed(text)
        return [Piece(content=shown)] if shown else []

    def _take_calls(self, event: Mapping[str, Any]) -> list[Piece]:
        if event["type"] == "region_open":
            captures = event["captures"]
            self._raw, self._begun, self._given_id = event["mark"], [], captures.get("id")
            name = captures.get("name", "").strip()
            self._is_no_call = name not in self._kinds and (bool(name) or self._named is True)
            self._scanner = None
            if self._named is not None and not self._is_no_call:
                self._scanner = CallScanner(name if self._named else None, self._kinds)
            return []
        if event["type"] == "region_chunk":
            self._raw += event["text"]
            return self._scan(event["text"])
        raw, self._raw = self._raw + event["mark"], ""
        begun, self._begun = self._begun, []
        calls = None if self._cut_off else self._calls_of(event["value"])
        shown = sum(each.shown for each in begun)
        if calls is None or not {call.name for call in calls} <= self._kinds.keys():
            return self._spoilt(begun, raw, cut=self._cut and not event["mark"])
        self._content.mark()
        for number, each in enumerate(begun[: len(calls)]):
            calls[number] = replace(each.call, arguments="".join(each.text))
        self.num_calls += len(calls[shown:])
        return [Piece(call=call) for call in calls[shown:]]

    def _spoilt(self, begun: list[_Begun], raw: str, *, cut: bool) -> list[Piece]:
        """The region is no list of calls as a whole. Those that came before what spoils it are calls all the same, as
        they are where they are given out as they come; what follows them is content. `cut`: by a limit, so that what
        is missing could have been a call."""
        scanner = self._scanner
        rest = scanner.rest if scanner is not None and begun and all(map(_Begun.is_json, begun)) else None
        is_no_call = self._is_no_call or (scanner is not None and scanner.is_no_call)
        if rest is None and not cut:
            return [] if any(each.shown for each in begun) else self._as_content(raw)
        if not begun and (is_no_call or raw.lstrip()[:1] not in _TAGS):
            return self._as_content(raw)
        self._content.mark()
        calls = [replace(each.call, arguments="".join(each.text)) for each in begun if not each.shown]
        if calls and rest is None:
            calls[-1] = replace(calls[-1], complete=False)
        self.num_calls += len(calls)
        pieces = [Piece(call=call) for call in calls]
        if rest is None or (cut and not is_no_call and rest.strip(" \t\r\n,;[")[:1] in ("{", "", *_TAGS)):
            return pieces
        return [*pieces, *self._as_content(rest)]

    def _scan(self, text: str) -> list[Piece]:
        pieces: list[Piece] = []
        for part in self._scanner.feed(text) if self._scanner is not None else ():
            if part.name:
                pieces += self._begin(part.name)
                continue
            last = self._begun[-1]
            last.text.append(part.arguments)
            if last.shown:
                pieces.append(Piece(arguments=part.arguments))
        return pieces

    def _begin(self, name: str) -> list[Piece]:
        shown = name in self._streamed and all(each.shown for each in self._begun)
        before = self.num_calls + sum(not each.shown for each in self._begun)
        call = Call(new_id(name, self._dialect, before, self._given_id), name, "")
        self._begun.append(_Begun(call, shown, []))
        if not shown:
            return []
        self._content.mark()
        self.num_calls += 1
        return [Piece(call=call)]


class _Begun(NamedTuple):
    call: Call
    shown: bool
    text: list[str]
    """of its arguments, so far"""

    def is_json(self) -> bool:
        return json_or_none("".join(self.text)) is not None


def _scanned_as(calls: Mapping[str, Any]) -> bool | None:
    """Whether names stand in the marks of regions of `calls`. None: they are understood when they have ended."""
    if calls.get("content") != "json" or set(calls.get("content_args", {})) - {"allow_non_json"}:
        return None
    function = (calls.get("transform") or {}).get("function")
    return {str(WHOLE["function"]): False, str(NAMED["function"]): True}.get(str(function))


def read_whole(reader: AnswerReader, text: str) -> tuple[str, str, list[Call]]:
    """Content, reasoning and calls of a complete answer."""
    pieces = [*reader.feed(text), *reader.end()]
    calls = [piece.call for piece in pieces if piece.call is not None]
    return "".join(piece.content for piece in pieces), "".join(piece.reasoning for piece in pieces), calls
