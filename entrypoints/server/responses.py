"""The bodies that the server sends, as msgspec structs: quick to encode, one chunk per streamed token."""

from __future__ import annotations

import time
import uuid
from typing import Any

import msgspec
from msgspec import UNSET, UnsetType

from engine.request import RequestOutput
from entrypoints.server.logprobs import ChatLogprobs, CompletionLogprobs, PromptLogprobs


class PromptTokensDetails(msgspec.Struct):
    cached_tokens: int


class CompletionTokensDetails(msgspec.Struct):
    accepted_prediction_tokens: int
    reasoning_tokens: int = 0


class Usage(msgspec.Struct):
    prompt_tokens: int = 0
    completion_tokens: int = 0
    total_tokens: int = 0
    prompt_tokens_details: PromptTokensDetails | None = None
    completion_tokens_details: CompletionTokensDetails | None = None


class CompletionChoice(msgspec.Struct):
    index: int
    text: str
    logprobs: CompletionLogprobs | None = None
    finish_reason: str | None = None
    stop_reason: int | str | None = None
    prompt_logprobs: PromptLogprobs | UnsetType = UNSET
    schema_error: str | UnsetType = UNSET
    """where the text does not keep a schema that is not strict"""
    token_ids: list[int] | UnsetType = UNSET
    """those behind the text, for requests that ask for them"""
    prompt_token_ids: list[int] | UnsetType = UNSET


class Completion(msgspec.Struct):
    id: str
    created: int
    model: str
    choices: list[CompletionChoice]
    object: str = "text_completion"
    system_fingerprint: str | None = None
    usage: Usage | None = None
    kv_transfer_params: dict[str, Any] | UnsetType | None = UNSET
    """where another engine finds the prompt's pages, for requests with these parameters"""
    num_moves: int | UnsetType = UNSET
    """of an event that says so: times that another core went on"""


class FunctionCall(msgspec.Struct, omit_defaults=True):
    name: str | UnsetType = UNSET
    """in a stream not where arguments go on"""
    arguments: str | UnsetType = UNSET


class CustomCall(msgspec.Struct):
    name: str
    input: str


class ToolCall(msgspec.Struct, omit_defaults=True):
    """`function` or `custom`, as `type` says."""

    index: int | UnsetType = UNSET
    """in a stream"""
    id: str | UnsetType = UNSET
    type: str | UnsetType = UNSET
    function: FunctionCall | UnsetType = UNSET
    custom: CustomCall | UnsetType = UNSET


class ChatMessage(msgspec.Struct):
    content: str | None
    role: str = "assistant"
    refusal: str | None = None
    annotations: list[Any] = []
    reasoning: str | UnsetType = UNSET
    reasoning_content: str | UnsetType = UNSET
    tool_calls: list[ToolCall] | UnsetType = UNSET
    function_call: FunctionCall | UnsetType = UNSET


class ChatChoice(msgspec.Struct):
    index: int
    message: ChatMessage
    logprobs: ChatLogprobs | None = None
    finish_reason: str | None = None
    stop_reason: int | str | None = None
    schema_error: str | UnsetType = UNSET
    token_ids: list[int] | UnsetType = UNSET


class ChatCompletion(msgspec.Struct):
    id: str
    created: int
    model: str
    choices: list[ChatChoice]
    object: str = "chat.completion"
    system_fingerprint: str | None = None
    usage: Usage | None = None
    prompt_logprobs: PromptLogprobs | UnsetType = UNSET
    kv_transfer_params: dict[str, Any] | UnsetType | None = UNSET
    prompt_token_ids: list[int] | UnsetType = UNSET


class Delta(msgspec.Struct, omit_defaults=True):
    role: str | None = None
    content: str | None = None
    reasoning: str | UnsetType = UNSET
    reasoning_content: str | UnsetType = UNSET
    tool_calls: list[ToolCall] | UnsetType = UNSET
    function_call: FunctionCall | UnsetType = UNSET


class ChatChunkChoice(msgspec.Struct):
    index: int
    delta: Delta
    logprobs: ChatLogprobs | None = None
    finish_reason: str | None = None
    stop_reason: int | str | None = None
    schema_error: str | UnsetType = UNSET
    token_ids: list[int] | UnsetType = UNSET


class ChatChunk(msgspec.Struct):
    id: str
    created: int
    model: str
    choices: list[ChatChunkChoice]
    object: str = "chat.completion.chunk"
    system_fingerprint: str | None = None
    usage: Usage | None = None
    prompt_token_ids: list[int] | UnsetType = UNSET
    """in the first one"""
    num_moves: int | UnsetType = UNSET
    """of an event that says so: times that another core went on"""


def new_id(prefix: str, separator: str = "-") -> str:
    return f"{prefix}{separator}{uuid.uuid4().hex}"


def new_item_id(prefix: str) -> str:
    """As the Responses API has them."""
    return f"{prefix}_{uuid.uuid4().hex}"


def now() -> int:
    return int(time.time())


class UsageCount:
    """Adds up the usage of one HTTP request over its prompts, from deltas or from whole outputs."""

    def __init__(self) -> None:
        self._latest: dict[int, RequestOutput] = {}
        self._completion = self._moves = 0

    def add(self, prompt_index: int, output: RequestOutput) -> None:
        self._latest[prompt_index] = output
        for part in output.outputs:
            self._completion += len(part.token_ids)

    def moved(self) -> int:
        """Times that other cores went on; 0: not since this was asked last."""
        moves = sum(output.metrics.num_moves for output in self._latest.values() if output.metrics is not None)
        before, self._moves = self._moves, moves
        return moves if moves != before else 0

    def drop_completion(self, tokens: int) -> None:
        """Tokens that were generated and are not sent (echo with max_tokens 0)."""
        self._completion -= tokens

    def usage(self, reasoning_tokens: int = 0) -> Usage:
        latest = self._latest.values()
        prompt = sum(len(output.prompt_token_ids) for output in latest)
        cached = sum(output.num_cached_tokens for output in latest)
        accepted = sum(output.num_accepted_tokens for output in latest)
        total = prompt + self._completion
        details = (
            PromptTokensDetails(cached),
            CompletionTokensDetails(min(accepted, self._completion), reasoning_tokens),
        )
        return Usage(prompt, self._completion, total, *details)
