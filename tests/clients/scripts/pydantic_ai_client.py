"""pydantic-ai: tools, and output by a tool, by the server's own structure, and by a prompt; over chat completions,
responses and messages."""

from __future__ import annotations

import asyncio
from importlib.metadata import version
from typing import Literal

from anthropic import AsyncAnthropic
from checks import Checks
from openai import AsyncOpenAI
from pydantic import BaseModel
from pydantic_ai import Agent, ModelRetry, NativeOutput, PromptedOutput, ToolOutput
from pydantic_ai.models import Model
from pydantic_ai.models.anthropic import AnthropicModel as Messages
from pydantic_ai.models.openai import OpenAIChatModel as Chat
from pydantic_ai.models.openai import OpenAIResponsesModel as Responses
from pydantic_ai.providers.anthropic import AnthropicProvider
from pydantic_ai.providers.openai import OpenAIProvider

checks = Checks()
of_anthropics = {"base_url": checks.base, "api_key": "none", "max_retries": 0}


def models_of(*kinds: type[Model]) -> list[Model]:
    """New ones: their connections belong to one event loop."""
    openai = OpenAIProvider(openai_client=AsyncOpenAI(base_url=f"{checks.base}/v1", api_key="none", max_retries=0))
    anthropic = AnthropicProvider(anthropic_client=AsyncAnthropic(**of_anthropics))
    return [kind(checks.model, provider=anthropic if kind is Messages else openai) for kind in kinds]


SHORT = {"max_tokens": 300}
ASKED = "What is the capital of France? Answer in one sentence."


class Place(BaseModel):
    """A city to go to."""

    city: Literal["Paris", "Rome"]
    sunny: bool


def plain() -> None:
    for model in models_of(Chat, Responses, Messages):
        result = Agent(model, instructions="Be short.", model_settings=SHORT).run_sync(ASKED)
        assert "Paris" in result.output and result.usage.input_tokens > 5, result


async def streamed() -> None:
    for model in models_of(Chat, Responses, Messages):
        async with Agent(model, model_settings=SHORT).run_stream(ASKED) as result:
            parts = [part async for part in result.stream_text(delta=True)]
        assert "Paris" in "".join(parts), model


def tool_output() -> None:
    """The model must call the tool: a small one does, because the server holds it to that."""
    for model in models_of(Chat, Responses, Messages):
        agent = Agent(model, output_type=ToolOutput(Place, strict=True), model_settings=SHORT)
        assert isinstance(agent.run_sync(ASKED).output, Place), model


def native_output() -> None:
    for model in models_of(Chat, Responses):
        agent = Agent(model, output_type=NativeOutput(Place, strict=True), model_settings=SHORT)
        assert isinstance(agent.run_sync(ASKED).output, Place)


async def native_output_streamed() -> None:
    agent = Agent(*models_of(Chat), output_type=NativeOutput(Place, strict=True), model_settings=SHORT)
    async with agent.run_stream(ASKED) as result:
        assert isinstance(await result.get_output(), Place)


def prompted_output() -> None:
    """The schema is in the prompt alone; the server holds the answer to JSON."""
    prompted = PromptedOutput(Place, template="Answer with JSON.")
    agent = Agent(*models_of(Chat), output_type=prompted, model_settings=SHORT)
    assert isinstance(agent.run_sync('Say {"city": "Paris", "sunny": true}').output, Place)


def tools() -> None:
    """A tool is called, refuses once, is called again, and then the output is made of a second tool."""
    asked: list[str] = []

    def get_weather(city: Literal["Paris", "Rome"]) -> Place:
        """Weather of a city, and the end."""
        asked.append(city)
        if len(asked) == 1:
            raise ModelRetry("Ask again.")
        return Place(city=city, sunny=True)

    for model in models_of(Chat, Responses, Messages):
        asked.clear()
        settings = {**SHORT, "parallel_tool_calls": False}
        result = Agent(model, output_type=get_weather, model_settings=settings, retries=2).run_sync(ASKED)
        assert len(asked) == 2 and result.output.sunny, (model, asked)
        assert len(result.all_messages()) >= 4


def models() -> None:
    async def go() -> None:
        client = AsyncAnthropic(**of_anthropics)
        assert [model.id async for model in client.models.list()]

    asyncio.run(go())


checks.run(
    plain,
    streamed,
    tool_output,
    native_output,
    native_output_streamed,
    prompted_output,
    tools,
    models,
)
checks.tell(version("pydantic-ai-slim"))
