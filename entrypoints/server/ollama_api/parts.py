"""What Ollama's routes send. Durations are nanoseconds."""

from __future__ import annotations

from datetime import UTC, datetime
from typing import Annotated

import msgspec
from msgspec import UNSET, UnsetType

from engine.dialects.forms import Call
from entrypoints.server.logprobs import ChatLogprob


class CalledFunction(msgspec.Struct):
    index: int
    name: str
    arguments: Annotated[msgspec.Raw, msgspec.Meta(extra_json_schema={"type": "object"})]
    """as the model wrote it: its numbers may be larger than any that are read here"""


class ToolCall(msgspec.Struct):
    id: str
    function: CalledFunction


class Message(msgspec.Struct):
    content: str = ""
    role: str = "assistant"
    thinking: str | UnsetType = UNSET
    tool_calls: list[ToolCall] | UnsetType = UNSET


class Part(msgspec.Struct, kw_only=True):
    """Of a stream, or all. What is counted and measured comes with its end."""

    model: str
    created_at: str
    done: bool = False
    done_reason: str | UnsetType = UNSET
    logprobs: list[ChatLogprob] | UnsetType = UNSET
    schema_error: str | UnsetType = UNSET
    """where the text does not keep the schema of `format`"""
    total_duration: int | UnsetType = UNSET
    load_duration: int | UnsetType = UNSET
    prompt_eval_count: int | UnsetType = UNSET
    prompt_eval_duration: int | UnsetType = UNSET
    eval_count: int | UnsetType = UNSET
    eval_duration: int | UnsetType = UNSET


class ChatPart(Part, kw_only=True):
    message: Message


class GeneratePart(Part, kw_only=True):
    response: str
    thinking: str | UnsetType = UNSET
    context: list[int] | UnsetType = UNSET


def called(index: int, call: Call) -> ToolCall:
    return ToolCall(call.id, CalledFunction(index, call.name, msgspec.Raw(call.arguments.encode())))


def now() -> str:
    return datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%S.%fZ")
