"""How the served model speaks: its dialect, bound to its tokenizer and its chat template."""

from __future__ import annotations

import asyncio
import re
from collections.abc import Collection, Mapping, Sequence
from importlib import import_module
from types import ModuleType
from typing import TYPE_CHECKING, Any, Literal

from msgspec.structs import replace

from engine.dialects.families import DIALECTS, PLAIN
from engine.dialects.grammar import calls_grammar
from engine.dialects.resolve import AUTO, NONE, dialect_of
from engine.errors import InvalidRequestError
from engine.frontend.told_tools import knows_tools
from engine.grammars.language import ANY_TEXT, WHITESPACE
from engine.grammars.marks import Marks
from engine.request import Thinking

if TYPE_CHECKING:
    from engine.dialects.answers import AnswerReader
    from engine.frontend.tokenizer import Tokenizer

ThinkingState = Literal["open", "closed", "none"]
"""as the prompt leaves it: begun, done with (or switched off), or the model's own affair"""

_TAIL_CHARS = 4096
_OFF = ("none", "off", "disabled")


class Speech:
    """`tool_parser`, `reasoning_parser`: names, or "auto". Raises `ConfigError`."""

    def __init__(self, tokenizer: Tokenizer, tool_parser: str = AUTO, reasoning_parser: str = AUTO) -> None:
        template = tokenizer.chat_template_text(True)
        self.dialect = dialect_of(
            template,
            tool_parser=tool_parser,
            reasoning_parser=reasoning_parser,
            own_template=tokenizer.response_template,
        )
        own_calls = tokenizer.response_template is not None and "tool_calls" in self.dialect.fields
        if tool_parser == AUTO and not own_calls and not knows_tools(template):
            hermes = DIALECTS["hermes"]  # they are told of tools in words, and asked for its form
            own = {name: each for name, each in self.dialect.fields.items() if name not in ("tool_calls", "nothing")}
            self.dialect = replace(self.dialect, name=hermes.name, fields={**own, **hermes.fields}, form=hermes.form)
        self.knows_calls = tool_parser != NONE and "tool_calls" in self.dialect.fields
        self._template = template
        self._marks = Marks(tokenizer.backend)
        self._templates: dict[bool, Any] = {}
        self._loading: asyncio.Future[ModuleType] | None = None

    async def load_reader(self) -> None:
        """Half a second the first time, seconds on a machine that has not seen it: no stream waits for it."""
        if self._loading is None:
            self._loading = asyncio.ensure_future(asyncio.to_thread(import_module, "engine.dialects.answers"))
        if not self._loading.done():
            await asyncio.shield(self._loading)

    @property
    def always_reads(self) -> bool:
        """Also answers of requests without tools."""
        return self.dialect.thinking is not None or bool(set(self.dialect.fields) - {"tool_calls"})

    @property
    def thinks(self) -> bool:
        """Whether its template, or whoever serves it, knows of thinking."""
        return self.dialect.thinking is not None or self.dialect.opens is not None or "reasoning" in self.dialect.fields

    def shows_special_tokens(self, with_calls: bool) -> bool:
        """A mark is one: it must be seen to be read."""
        dialect = self.dialect
        marks = [*(dialect.thinking or ()), dialect.opens or ""]
        if with_calls and dialect.form is not None:
            marks += [dialect.form.begin, *dialect.form.call, dialect.form.end]
        return any(self._marks.has_special(mark) for mark in marks)

    def reader(
        self, tools: Sequence[Mapping[str, Any]], state: ThinkingState, streamed: Collection[str] = ()
    ) -> AnswerReader:
        """Behind `load_reader`. `streamed`: names of tools whose arguments are wanted as they come."""
        from engine.dialects.answers import AnswerReader, response_template

        with_calls = bool(tools)
        if with_calls not in self._templates:
            self._templates[with_calls] = response_template(self.dialect, with_calls=with_calls)
        return AnswerReader(
            self.dialect, self._templates[with_calls], thinks=state == "open", tools=tools, streamed=streamed
        )

    def state_of(self, prompt: str, continued: str) -> ThinkingState:
        """`continued`: what the assistant has said already, where its message goes on."""
        if self.dialect.thinking is None:
            return "none"
        begin, end = (mark.strip() for mark in self.dialect.thinking)
        tail = prompt[-_TAIL_CHARS:].rstrip()
        if tail.endswith(begin) or continued.rfind(begin) > continued.rfind(end):
            return "open"
        return "closed" if tail.endswith(end) or end in continued else "none"

    def thinking(self, state: ThinkingState, budget: int | None = None, *, calls: bool = False) -> Thinking | None:
        """What may come before an answer, or before `calls`, that a grammar holds to its form. Without thinking a
        `budget` means nothing."""
        dialect = self.dialect
        most = None if budget is None else max(budget, 1)
        if dialect.opens is not None:
            return Thinking(open=dialect.opens, close=dialect.closes[calls], required=True, budget=most)
        if dialect.thinking is None or state == "closed":
            return None
        begin, end = dialect.thinking
        return Thinking(open=None if state == "open" else begin, close=end, budget=most)

    def any_answer(self) -> str:
        """Lark of all but another thinking."""
        begin = re.escape((self.dialect.thinking or ("",))[0].strip() or (self.dialect.opens or "")).replace("/", r"\/")
        return f"start: ANSWER\nANSWER: /{ANY_TEXT}/ & ~/[ \\n]*{begin}{ANY_TEXT}/\n"

    def calls_grammar(self, tools: Sequence[Mapping[str, Any]], *, required: bool, parallel: bool) -> str:
        """Lark. Raises `InvalidRequestError`."""
        if self.dialect.form is None:
            raise InvalidRequestError(
                f"tool_choice: calls of this model ({self.dialect.name}) can be read, but not required, strict or "
                "limited: name a form with --tool-call-parser",
                "tool_choice",
            )
        return calls_grammar(
            self.dialect.form, tools, self._marks, required=required, parallel=parallel, whitespace=WHITESPACE
        )

    def template_switches(self, effort: str | None, enabled: bool | None) -> dict[str, Any]:
        """What clients say of thinking, in the words of this chat template."""
        found: dict[str, Any] = {}
        if effort is not None:
            enabled = effort not in _OFF if enabled is None else enabled
            if self._names("reasoning_effort") and effort not in _OFF:
                found["reasoning_effort"] = effort
        if enabled is not None:
            found |= {name: enabled for name in ("enable_thinking", "thinking") if self._names(name)}
        return found

    def _names(self, variable: str) -> bool:
        return re.search(rf"(?<![\w.'\"]){variable}\b(?!\s*['\"])", self._template) is not None


def no_calls(speech: Speech) -> InvalidRequestError:
    reason = "is switched off" if speech.dialect is PLAIN else "is not known"
    return InvalidRequestError(
        f"tools: how this model writes calls {reason}; start the server with --tool-call-parser", "tools"
    )
