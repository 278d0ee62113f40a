"""What a chat's answer is made of: content, thinking and calls, for the doors that show them."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from msgspec.structs import replace

from engine import SamplingParams
from engine.dialects.forms import Piece
from engine.request import CompletionOutput, StructuredOutputsParams
from entrypoints.server.speech import Speech, ThinkingState, no_calls
from entrypoints.server.tools import ToolUse

if TYPE_CHECKING:
    from engine.dialects.answers import AnswerReader


class Answers:
    """Of one request, whose samples are read each by itself. `prepare` comes before the first of them."""

    def __init__(
        self,
        speech: Speech,
        use: ToolUse,
        structure: StructuredOutputsParams | None,
        budget: int | None = None,
        *,
        stream: bool = False,
    ) -> None:
        """`structure`: what content must be; where calls are required there is none. `budget`: tokens of thinking.
        `stream`: arguments of calls are wanted as they come. Raises `InvalidRequestError`."""
        if use.tools and not speech.knows_calls:
            raise no_calls(speech)
        self._speech, self._use, self._budget = speech, use, budget
        self._structure = None if use.required else structure
        self._state: ThinkingState = "none"
        self._readers: dict[int, AnswerReader] = {}
        self._streamed = {tool["function"]["name"] for tool in use.tools} - use.custom if stream else set()
        """a custom tool's input is a text within its arguments"""
        self.reads = bool(use.tools) or speech.always_reads
        self.reasoning_tokens = 0
        """of what has been read, by its share of the text"""

    def prepare(self, params: SamplingParams, prompt: str, continued: str) -> SamplingParams:
        """For what the prompt turned out to be: `continued` of it is the answer's beginning."""
        speech, use = self._speech, self._use
        self._state = speech.state_of(prompt, continued)
        if self.reads and params.skip_special_tokens and speech.shows_special_tokens(bool(use.tools)):
            params = replace(params, skip_special_tokens=False)
        structure = self._structure
        if use.required or (structure is None and use.needs_grammar):
            grammar = speech.calls_grammar(use.tools, required=use.required, parallel=use.parallel)
            structure = StructuredOutputsParams(grammar=grammar)
        elif structure is not None and use.tools:
            calls = speech.calls_grammar(use.tools, required=True, parallel=use.parallel)
            structure = replace(structure, alternative=calls)
        thinking = speech.thinking(self._state, self._budget, calls=use.required) if self.reads else None
        if structure is None and thinking is not None and thinking.budget is not None:
            structure = StructuredOutputsParams(grammar=speech.any_answer())
        if structure is None:
            return params
        return replace(params, structured_outputs=replace(structure, thinking=thinking))

    def pieces(self, part: CompletionOutput) -> list[Piece]:
        """Of what is new; of a whole answer all."""
        if not self.reads:
            return [Piece(content=part.text)] if part.text else []
        reader = self._readers.get(part.index)
        if reader is None:
            reader = self._readers[part.index] = self._speech.reader(self._use.tools, self._state, self._streamed)
        before = reader.num_calls
        pieces = reader.feed(part.text)
        thought = sum([len(piece.reasoning) for piece in pieces])
        if thought and part.text:
            self.reasoning_tokens += round(len(part.token_ids) * min(thought / len(part.text), 1.0))
        if part.finish_reason is not None:
            rest = reader.end(cut=part.finish_reason == "length")
            pieces += rest if not self._use.required else [piece for piece in rest if not piece.content]  # of a mark
        if not self._use.parallel and reader.num_calls > 1:
            pieces = _first_call_only(pieces, before)
        return pieces

    def finish_reason(self, part: CompletionOutput) -> str | None:
        reader = self._readers.get(part.index)
        if part.finish_reason == "stop" and reader is not None and reader.num_calls:
            return "function_call" if self._use.legacy else "tool_calls"
        return part.finish_reason

    def schema_error(self, part: CompletionOutput) -> str | None:
        """Calls are no content, and keep schemas of their own."""
        reader = self._readers.get(part.index)
        return None if reader is not None and reader.num_calls else part.schema_error

    @property
    def use(self) -> ToolUse:
        return self._use


def _first_call_only(pieces: list[Piece], before: int) -> list[Piece]:
    kept: list[Piece] = []
    for piece in pieces:
        before += piece.call is not None
        if before <= 1 or (piece.call is None and not piece.arguments):
            kept.append(piece)
    return kept


def joined(pieces: list[Piece]) -> tuple[str, str, list[Any]]:
    """Content, reasoning, calls."""
    calls = [piece.call for piece in pieces if piece.call is not None]
    return "".join(piece.content for piece in pieces), "".join(piece.reasoning for piece in pieces), calls
