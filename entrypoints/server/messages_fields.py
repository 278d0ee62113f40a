"""Anthropic's request bodies, and what the engine takes of them; `messages_turns` reads the messages.

What Anthropic's own servers do with tools that are theirs (`web_search_20250305`, …), nobody does here: such tools are
told of as unknown fields are.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal, NoReturn

from pydantic import Field

from engine import SamplingParams
from engine.errors import InvalidRequestError
from engine.limits import Limits
from engine.request import StructuredOutputsParams
from entrypoints.server.fields import Body, Effort, NoEffect, Objects, Texts
from entrypoints.server.messages_turns import begun_answer, chat_of
from entrypoints.server.prompting import Conversation
from entrypoints.server.speech import Speech
from entrypoints.server.tools import ToolUse, check_name, check_parameters, names_of


class ToolChoice(Body):
    type: Literal["auto", "any", "tool", "none"]
    name: str | None = None
    disable_parallel_tool_use: bool = False


class ThinkingConfig(Body):
    type: Literal["enabled", "adaptive", "disabled"]
    budget_tokens: NoEffect = None
    display: Literal["summarized", "omitted"] = "summarized"


class OutputConfig(Body):
    effort: Effort | None = None
    format: dict[str, Any] | None = None


class CountTokensRequest(Body):
    """What the prompt is made of."""

    model: str | None = None
    messages: Objects = Field(min_length=1)
    system: str | Objects | None = None
    tools: Objects | None = None
    tool_choice: ToolChoice | None = None
    thinking: ThinkingConfig | None = None
    output_config: OutputConfig | None = None
    output_format: dict[str, Any] | None = None
    """what `output_config.format` was called before"""
    cache_control: NoEffect = None
    context_management: NoEffect = None
    diagnostics: NoEffect = None
    inference_geo: NoEffect = None
    metadata: NoEffect = None
    service_tier: NoEffect = None
    speed: NoEffect = None
    chat_template_kwargs: dict[str, Any] | None = None

    def unknown_fields(self) -> list[str]:
        ignored = [f"tools.{tool['type']}" for tool in self.tools or () if _is_anthropics(tool)]
        return super().unknown_fields() + ignored

    def conversation(self, speech: Speech, use: ToolUse, limits: Limits) -> Conversation:
        """As long as the body, so it is not for the event loop. Raises `InvalidRequestError`."""
        effort = self.output_config.effort if self.output_config is not None else None
        thinks = None if self.thinking is None else self.thinking.type != "disabled"
        chat = chat_of(self.messages, self.system, limits)
        begun = begun_answer(chat)
        return Conversation(
            messages=chat,
            tools=use.tools,
            add_generation_prompt=not begun,
            continue_final_message=begun,
            template_kwargs={**speech.template_switches(effort, thinks), **(self.chat_template_kwargs or {})},
        )

    def tool_use(self, limits: Limits) -> ToolUse:
        """Raises `InvalidRequestError`."""
        limits.check("tools", len(self.tools or ()), "tools")
        given = enumerate(self.tools or ())
        tools = [_tool(tool, f"tools[{number}]") for number, tool in given if not _is_anthropics(tool)]
        names = names_of(tools, "tools")
        choice = self.tool_choice or ToolChoice(type="auto")
        if choice.type == "any" and not names:
            _refuse("tool_choice is any, but there are no tools", "tool_choice")
        if choice.type == "tool" and choice.name not in names:
            _refuse(f"tool_choice names {str(choice.name)[:60]!r}, which is none of the tools", "tool_choice")
        if choice.type == "none" or not tools:
            return ToolUse()
        if choice.type == "tool":
            tools = [tool for tool in tools if tool["function"]["name"] == choice.name]
        return ToolUse(
            tools=tools,
            required=choice.type in ("any", "tool"),
            parallel=not choice.disable_parallel_tool_use,
        )


class MessagesRequest(CountTokensRequest):
    max_tokens: int
    stop_sequences: Texts | None = None
    stream: bool = False
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    priority: int = 0
    cache_salt: str | None = Field(default=None, min_length=1)

    @property
    def shows_thinking(self) -> bool:
        return self.thinking is None or self.thinking.display != "omitted"

    def structure(self) -> tuple[str | None, StructuredOutputsParams | None]:
        """What the answer must be, and the field that says so. Raises `InvalidRequestError`."""
        config = self.output_config
        field, given = "output_config.format", config.format if config is not None else None
        if given is None:
            field, given = "output_format", self.output_format
        if given is None:
            return None, None
        if given.get("type") != "json_schema" or not isinstance(given.get("schema"), dict):
            _refuse(f"{field} must be an object of type json_schema that holds a schema", field)
        return field, StructuredOutputsParams(json=given["schema"])

    def sampling_params(self, defaults: SamplingParams, structure: StructuredOutputsParams | None) -> SamplingParams:
        """Where the client says nothing, what the model's authors recommend holds. Raises `InvalidRequestError`."""
        return SamplingParams(
            temperature=defaults.temperature if self.temperature is None else self.temperature,
            top_p=defaults.top_p if self.top_p is None else self.top_p,
            top_k=defaults.top_k if self.top_k is None else self.top_k,
            min_p=defaults.min_p,
            repetition_penalty=defaults.repetition_penalty,
            max_tokens=self.max_tokens,
            stop=self.stop_sequences,
            structured_outputs=structure,
        )


def _is_anthropics(tool: Mapping[str, Any]) -> bool:
    """A tool without a schema, which Anthropic's models know."""
    return isinstance(tool.get("type"), str) and tool["type"] != "custom" and "input_schema" not in tool


def _tool(given: Mapping[str, Any], where: str) -> dict[str, Any]:
    """As chat templates take it."""
    check_name(given, where, "tools")
    check_parameters(given.get("input_schema"), f"{where}.input_schema", "tools")
    function: dict[str, Any] = {"name": given["name"], "parameters": given["input_schema"]}
    if isinstance(given.get("description"), str):
        function["description"] = given["description"]
    if given.get("strict") is True:
        function["strict"] = True
    return {"type": "function", "function": function}


def _refuse(message: str, field: str) -> NoReturn:
    raise InvalidRequestError(message, field)
