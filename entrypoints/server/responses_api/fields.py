"""Bodies of `/v1/responses`, and their tools in the shape of chat completions."""

from __future__ import annotations

import logging
from typing import Any, ClassVar, Self

import msgspec
from msgspec import UNSET, Struct, UnsetType
from pydantic import Field, model_validator

from engine.errors import InvalidRequestError
from engine.limits import Limits
from engine.request import StructuredOutputsParams
from entrypoints.server.fields import Body, Effort, NoEffect, Objects, refusal
from entrypoints.server.protocol import NOT_SUPPORTED, SamplingFields
from entrypoints.server.tools import ToolFields, ToolUse

logger = logging.getLogger("pageloom.server")

_MOST_MEMBERS = 512
ENCRYPTED_REASONING = "reasoning.encrypted_content"
LOGPROBS = "message.output_text.logprobs"


class TextOptions(Body):
    format: dict[str, Any] | None = None
    verbosity: NoEffect = None


class ReasoningOptions(Body):
    effort: Effort | None = None
    summary: NoEffect = None
    generate_summary: NoEffect = None


class ContextFields(Body):
    """What a conversation is made of."""

    model: str | None = None
    input: str | Objects | None = None
    instructions: str | None = None
    previous_response_id: str | None = None
    tools: Objects | None = None
    tool_choice: str | dict[str, Any] | None = None
    parallel_tool_calls: bool | None = None
    reasoning: ReasoningOptions | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    truncation: NoEffect = None
    client_metadata: NoEffect = None
    """Codex's"""

    def items(self) -> list[dict[str, Any]]:
        if self.input is None:
            return []
        if isinstance(self.input, str):
            return [{"type": "message", "role": "user", "content": self.input}]
        return self.input


class StreamOptions(Body):
    """Usage comes with every response."""

    include_usage: NoEffect = None
    include_obfuscation: NoEffect = None


class ResponsesRequest(ContextFields, SamplingFields):
    UNSUPPORTED: ClassVar = NOT_SUPPORTED | {"conversation": (), "prompt": (), "context_management": ()}

    stream_options: StreamOptions | None = None  # type: ignore[assignment]  # nothing asks it what the others' say
    max_output_tokens: int | None = Field(default=None, ge=1)
    max_tool_calls: int | None = None
    """has no effect: no tools are called here"""
    metadata: dict[str, Any] | None = None
    prompt_cache_key: str | None = None
    safety_identifier: str | None = None
    user: str | None = None
    top_logprobs: int | None = None
    text: TextOptions | None = None
    include: list[str] | None = None
    background: bool | None = False
    keep: bool | None = Field(default=True, alias="store")
    """`store`"""

    @model_validator(mode="after")
    def _refuse_what_is_not_supported(self) -> Self:
        if self.n not in (None, 1):
            raise refusal("n", "n must be 1: a response is one")
        if self.kv_transfer_params:  # its answer has no place to hand anything over
            raise refusal("kv_transfer_params", "kv_transfer_params are of completions and chats")
        if self.background and self.stream:
            raise refusal("background", "background responses are asked for later: stream must be false")
        if self.background and not self.keep:
            raise refusal("background", "background responses must be stored")
        return self

    def wanted_structure(self) -> tuple[str | None, StructuredOutputsParams | None]:
        """`text.format` in the shape of chat completions' `response_format`, or any other way to say it."""
        form = self.text.format if self.text is not None else None
        if form is None or form.get("type") == "text":
            return self.structure()
        if self.response_format is not None:
            raise InvalidRequestError("text.format and response_format both say what the answer must be", "text")
        given = form
        if form.get("type") == "json_schema":
            given = {"type": "json_schema", "json_schema": {key: form[key] for key in form if key != "type"}}
        name, structure = self.model_copy(update={"response_format": given}).structure()
        return "text.format" if name == "response_format" else name, structure


class InputTokensRequest(ContextFields):
    text: NoEffect = None
    conversation: NoEffect = None


class CompactRequest(ContextFields):
    prompt_cache_key: NoEffect = None


class NamedTools(Struct, frozen=True):
    """`use`: the tools as chat completions have them. `namespaces`: by name, where a tool is in one, and its name in
    there. `ignored`: kinds that only OpenAI's servers run."""

    use: ToolUse
    namespaces: dict[str, tuple[str, str]]
    ignored: list[str]


def tools_of(body: ContextFields, limits: Limits) -> NamedTools:
    """Raises `InvalidRequestError`."""
    limits.check("tools", len(body.tools or ()), "tools")
    tools: list[dict[str, Any]] = []
    namespaces: dict[str, tuple[str, str]] = {}
    ignored = []
    for number, tool in enumerate(body.tools or ()):
        kind = tool.get("type")
        if kind == "namespace":
            members = _members(tool, number)
            limits.check("tools", len(tools) + len(members), "tools")
            for each in members:
                name = f"{tool['name']}__{each.get('name')}"
                namespaces[name] = (tool["name"], str(each.get("name")))
                tools.append(_function({**each, "name": name}))
        elif kind == "function":
            tools.append(_function(tool))
        elif kind == "custom":
            tools.append({"type": "custom", "custom": {key: tool[key] for key in tool if key != "type"}})
        else:
            ignored.append(f"tools[{number}].{str(kind)[:40]}")
    choice = body.tool_choice
    if isinstance(choice, dict) and choice.get("type") == "allowed_tools":
        choice = {**choice, "allowed_tools": {"mode": choice.get("mode", "auto"), "tools": choice.get("tools")}}
    fields = ToolFields(tools=tools, tool_choice=choice, parallel_tool_calls=body.parallel_tool_calls)
    return NamedTools(fields.tool_use(limits), namespaces, ignored)


def _function(tool: dict[str, Any]) -> dict[str, Any]:
    known = ("name", "description", "parameters", "strict")
    return {"type": "function", "function": {key: tool[key] for key in known if tool.get(key) is not None}}


def _members(tool: dict[str, Any], number: int) -> list[dict[str, Any]]:
    members = tool.get("tools")
    if not isinstance(tool.get("name"), str) or not isinstance(members, list) or len(members) > _MOST_MEMBERS:
        raise InvalidRequestError(f"tools[{number}] must have a name, and at most {_MOST_MEMBERS} tools in it", "tools")
    if not all(isinstance(each, dict) and each.get("type", "function") == "function" for each in members):
        raise InvalidRequestError(f"tools[{number}].tools must be functions", "tools")
    return members


class InputTokensDetails(Struct):
    cached_tokens: int
    cache_write_tokens: int = 0
    """nothing is charged for it"""


class OutputTokensDetails(Struct):
    reasoning_tokens: int


class ResponseUsage(Struct):
    input_tokens: int
    input_tokens_details: InputTokensDetails
    output_tokens: int
    output_tokens_details: OutputTokensDetails
    total_tokens: int


class ResponseObject(Struct):
    """OpenAI's `response`. What a client said of it is given back."""

    id: str
    created_at: int
    model: str
    status: str
    output: list[dict[str, Any]] = []
    object: str = "response"
    completed_at: int | None = None
    background: bool = False
    error: dict[str, Any] | None = None
    incomplete_details: dict[str, Any] | None = None
    instructions: str | None = None
    max_output_tokens: int | None = None
    max_tool_calls: int | None = None
    metadata: dict[str, Any] = {}
    parallel_tool_calls: bool = True
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    previous_response_id: str | None = None
    prompt_cache_key: str | None = None
    reasoning: dict[str, Any] = msgspec.field(default_factory=lambda: {"effort": None, "summary": None})
    safety_identifier: str | None = None
    service_tier: str = "default"
    store: bool = True
    temperature: float = 1.0
    text: dict[str, Any] = msgspec.field(default_factory=lambda: {"format": {"type": "text"}})
    tool_choice: Any = "auto"
    tools: list[dict[str, Any]] = []
    top_logprobs: int = 0
    top_p: float = 1.0
    truncation: str = "disabled"
    usage: ResponseUsage | None = None
    user: str | None = None
    schema_error: str | UnsetType = UNSET


class ResponseEvent(Struct):
    """Of a stream; what else it holds its type says, as OpenAI's documentation has it."""

    type: str
    sequence_number: int
