"""Content, thinking and calls as chat completions show them: in one message, or as deltas."""

from __future__ import annotations

from collections.abc import Sequence

from engine.dialects.forms import Call, Piece
from entrypoints.server.answers import joined
from entrypoints.server.responses import ChatMessage, CustomCall, Delta, FunctionCall, ToolCall
from entrypoints.server.tools import ToolUse, input_of


class ChatParts:
    """`reasoning_field`: under which thinking is shown; None: it is not."""

    def __init__(self, reasoning_field: str | None, use: ToolUse) -> None:
        self._field, self._use = reasoning_field, use
        self._calls: dict[int, int] = {}

    def message(self, pieces: Sequence[Piece], echoed: str) -> ChatMessage:
        content, reasoning, calls = joined(list(pieces))
        message = ChatMessage(echoed + content if echoed or content or not calls else None)
        if reasoning:
            self._tell(message, reasoning)
        if calls and self._use.legacy:
            message.function_call = FunctionCall(calls[0].name, calls[0].arguments)
        elif calls:
            message.tool_calls = [self._call(call) for call in calls]
        return message

    def deltas(self, index: int, pieces: Sequence[Piece]) -> list[Delta]:
        """Of sample `index`, one for each kind that comes."""
        deltas: list[Delta] = []
        for piece in pieces:
            delta = Delta()
            if piece.call is not None:
                number = self._calls[index] = self._calls.get(index, -1) + 1
                if self._use.legacy:
                    delta.function_call = FunctionCall(piece.call.name, piece.call.arguments)
                else:
                    call = self._call(piece.call)
                    call.index = number
                    delta.tool_calls = [call]
            elif piece.arguments:
                more = FunctionCall(arguments=piece.arguments)
                if self._use.legacy:
                    delta.function_call = more
                else:
                    delta.tool_calls = [ToolCall(index=self._calls[index], function=more)]
            elif piece.reasoning:
                if self._field is None:
                    continue
                self._tell(delta, piece.reasoning)
            else:
                delta.content = piece.content
            deltas.append(delta)
        return deltas

    def _tell(self, shown: ChatMessage | Delta, reasoning: str) -> None:
        if self._field in ("reasoning", "both"):
            shown.reasoning = reasoning
        if self._field in ("reasoning_content", "both"):
            shown.reasoning_content = reasoning

    def _call(self, call: Call) -> ToolCall:
        if call.name in self._use.custom:
            custom = CustomCall(call.name, input_of(call.arguments))
            return ToolCall(id=call.id, type="custom", custom=custom)
        return ToolCall(id=call.id, type="function", function=FunctionCall(call.name, call.arguments))
