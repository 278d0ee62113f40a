"""What Anthropic's routes send: a message of blocks, or the events that make one."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Annotated

import msgspec

from engine.dialects.forms import Call, Piece
from entrypoints.server.responses import Usage
from entrypoints.server.streaming import event
from entrypoints.server.tools import object_of


class TextBlock(msgspec.Struct, tag_field="type", tag="text"):
    text: str
    citations: None = None


class ThinkingBlock(msgspec.Struct, tag_field="type", tag="thinking"):
    thinking: str
    signature: str = ""
    """by which Anthropic knows its own thinking again; here nobody looks at it"""


class DirectCaller(msgspec.Struct, frozen=True, tag_field="type", tag="direct"):
    """The model itself."""


class ToolUseBlock(msgspec.Struct, tag_field="type", tag="tool_use"):
    id: str
    name: str
    input: Annotated[msgspec.Raw, msgspec.Meta(extra_json_schema={"type": "object"})]
    """as the model wrote it: its numbers may be larger than any that are read here"""
    caller: DirectCaller = DirectCaller()


_NOTHING = msgspec.Raw(b"{}")
Block = TextBlock | ThinkingBlock | ToolUseBlock


class MessageUsage(msgspec.Struct):
    """`input_tokens` does not count what was read from the cache."""

    input_tokens: int
    output_tokens: int
    cache_read_input_tokens: int
    cache_creation_input_tokens: int = 0
    cache_creation: None = None
    inference_geo: None = None
    output_tokens_details: None = None
    server_tool_use: None = None
    service_tier: str = "standard"


class Message(msgspec.Struct, tag_field="type", tag="message"):
    id: str
    model: str
    content: list[Block]
    usage: MessageUsage
    stop_reason: str | None = None
    stop_sequence: str | None = None
    role: str = "assistant"
    stop_details: None = None
    container: None = None


class TokenCount(msgspec.Struct):
    input_tokens: int


class TextDelta(msgspec.Struct, tag_field="type", tag="text_delta"):
    text: str


class ThinkingDelta(msgspec.Struct, tag_field="type", tag="thinking_delta"):
    thinking: str


class SignatureDelta(msgspec.Struct, tag_field="type", tag="signature_delta"):
    signature: str


class InputJsonDelta(msgspec.Struct, tag_field="type", tag="input_json_delta"):
    partial_json: str


class End(msgspec.Struct):
    stop_reason: str | None
    stop_sequence: str | None
    stop_details: None = None
    container: None = None


class MessageStart(msgspec.Struct, tag_field="type", tag="message_start"):
    message: Message


class Ping(msgspec.Struct, tag_field="type", tag="ping"):
    pass


class BlockStart(msgspec.Struct, tag_field="type", tag="content_block_start"):
    index: int
    content_block: Block


class BlockDelta(msgspec.Struct, tag_field="type", tag="content_block_delta"):
    index: int
    delta: TextDelta | ThinkingDelta | SignatureDelta | InputJsonDelta


class BlockStop(msgspec.Struct, tag_field="type", tag="content_block_stop"):
    index: int


class MessageDelta(msgspec.Struct, tag_field="type", tag="message_delta"):
    delta: End
    usage: MessageUsage


class MessageStop(msgspec.Struct, tag_field="type", tag="message_stop"):
    pass


Event = MessageStart | Ping | BlockStart | BlockDelta | BlockStop | MessageDelta | MessageStop


def named_event(body: Event) -> bytes:
    """A server-sent event with the name that its body has, too."""
    return f"event: {body.__struct_config__.tag}\n".encode() + event(body)


def usage_of(counted: Usage) -> MessageUsage:
    details = counted.prompt_tokens_details
    cached = 0 if details is None else details.cached_tokens
    return MessageUsage(counted.prompt_tokens - cached, counted.completion_tokens, cached)


class Blocks:
    """Pieces of one answer as blocks, in their order. `shows_thinking` false: blocks of thinking are empty."""

    def __init__(self, shows_thinking: bool) -> None:
        self._shows_thinking = shows_thinking
        self._index = -1
        self._open: type[Block] | None = None

    def whole(self, pieces: Sequence[Piece]) -> list[Block]:
        blocks: list[Block] = []
        for piece in pieces:
            last = blocks[-1] if blocks else None
            if piece.call is not None:
                call = piece.call
                written = call.arguments.encode() if call.complete else msgspec.json.encode(object_of(call.arguments))
                blocks.append(_tool_use(call, msgspec.Raw(written)))
            elif piece.reasoning:
                if not isinstance(last, ThinkingBlock):
                    blocks.append(last := ThinkingBlock(""))
                last.thinking += piece.reasoning if self._shows_thinking else ""
            elif isinstance(last, TextBlock):
                last.text += piece.content
            else:
                blocks.append(TextBlock(piece.content))
        return blocks

    def events(self, pieces: Sequence[Piece]) -> Iterator[Event]:
        """Of what is new."""
        for piece in pieces:
            if piece.call is not None:
                yield from self.end()
                yield self._start(_tool_use(piece.call, _NOTHING))
                self._open = ToolUseBlock
                if piece.call.arguments:
                    yield BlockDelta(self._index, InputJsonDelta(piece.call.arguments))
                if piece.call.arguments and piece.call.complete:
                    yield from self.end()
                continue
            if piece.arguments:
                yield BlockDelta(self._index, InputJsonDelta(piece.arguments))
                continue
            kind: type[TextBlock | ThinkingBlock] = ThinkingBlock if piece.reasoning else TextBlock
            if self._open is not kind:
                yield from self.end()
                yield self._start(kind(""))
                self._open = kind
            if not piece.reasoning:
                yield BlockDelta(self._index, TextDelta(piece.content))
            elif self._shows_thinking:
                yield BlockDelta(self._index, ThinkingDelta(piece.reasoning))

    def end(self) -> Iterator[Event]:
        """Of the block that is open."""
        if self._open is ThinkingBlock:
            yield BlockDelta(self._index, SignatureDelta(""))
        if self._open is not None:
            yield BlockStop(self._index)
        self._open = None

    def _start(self, block: Block) -> BlockStart:
        self._index += 1
        return BlockStart(self._index, block)


def _tool_use(call: Call, given: msgspec.Raw) -> ToolUseBlock:
    return ToolUseBlock(call.id, call.name, given)
