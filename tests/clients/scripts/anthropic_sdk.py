"""anthropic-sdk-python as a strict client: every message and every event must be of its own types."""

from __future__ import annotations

from typing import Literal

import anthropic
from checks import Checks
from pydantic import BaseModel

checks = Checks()
OPTIONS = {"base_url": checks.base, "api_key": "none", "max_retries": 0, "_strict_response_validation": True}
client = anthropic.Anthropic(**OPTIONS)
ASKED = {
    "model": checks.model,
    "max_tokens": 64,
    "messages": [{"role": "user", "content": "What is the capital of France?"}],
}
WEATHER = {
    "name": "get_weather",
    "description": "Weather of a city.",
    "input_schema": {
        "type": "object",
        "properties": {"city": {"enum": ["Paris", "Rome"]}, "days": {"type": "integer", "minimum": 1, "maximum": 7}},
        "required": ["city", "days"],
        "additionalProperties": False,
    },
}


class Place(BaseModel):
    city: Literal["Paris", "Rome"]
    sunny: bool


def models() -> None:
    assert checks.model in [model.id for model in client.models.list()]
    assert client.models.retrieve(checks.model).max_input_tokens > 0


def messages() -> None:
    reply = client.messages.create(**ASKED, system=[{"type": "text", "text": "Be short."}], metadata={"user_id": "u"})
    assert reply.stop_reason == "end_turn" and "Paris" in reply.content[0].text


def messages_streamed() -> None:
    whole = client.messages.create(**ASKED)
    events = list(client.messages.create(**ASKED, stream=True))
    assert [events[0].type, events[-1].type] == ["message_start", "message_stop"]
    texts = [event.delta.text for event in events if event.type == "content_block_delta"]
    assert "".join(texts) == whole.content[0].text


def by_the_streaming_helper() -> None:
    with client.messages.stream(**ASKED) as stream:
        text = "".join(stream.text_stream)
        assert stream.get_final_message().content[0].text == text


def tools() -> None:
    choice = {"type": "any", "disable_parallel_tool_use": True}
    reply = client.messages.create(**ASKED, tools=[WEATHER], tool_choice=choice)
    assert reply.stop_reason == "tool_use"
    use = reply.content[-1]
    assert use.name == "get_weather" and use.input["city"] in ("Paris", "Rome")
    told = [
        *ASKED["messages"],
        {"role": "assistant", "content": reply.content},
        {
            "role": "user",
            "content": [
                {
                    "type": "tool_result",
                    "tool_use_id": use.id,
                    "content": [{"type": "text", "text": "no such city"}],
                    "is_error": True,
                }
            ],
        },
    ]
    assert client.messages.create(**{**ASKED, "messages": told}, tools=[WEATHER]).usage.output_tokens


def tools_streamed() -> None:
    choice = {"type": "tool", "name": "get_weather", "disable_parallel_tool_use": True}
    with client.messages.stream(**ASKED, tools=[WEATHER], tool_choice=choice) as stream:
        (use,) = (block for block in stream.get_final_message().content if block.type == "tool_use")
    assert 1 <= use.input["days"] <= 7


def parsed() -> None:
    reply = client.messages.parse(**ASKED, output_format=Place)
    assert isinstance(reply.parsed_output, Place)


def thinking() -> None:
    for choice in ({"type": "enabled", "budget_tokens": 1024}, {"type": "adaptive"}, {"type": "disabled"}):
        assert client.messages.create(**{**ASKED, "max_tokens": 2048, "stop_sequences": ["."]}, thinking=choice).content


def tokens_are_counted() -> None:
    asked = {name: ASKED[name] for name in ("model", "messages")}
    reply = client.messages.create(**ASKED)
    counted = client.messages.count_tokens(**asked).input_tokens
    assert counted == reply.usage.input_tokens + reply.usage.cache_read_input_tokens


def beta_routes() -> None:
    reply = client.beta.messages.create(**ASKED, betas=["context-management-2025-06-27"])
    assert reply.content
    assert list(client.beta.messages.create(**ASKED, stream=True))
    asked = {name: ASKED[name] for name in ("model", "messages")}
    assert client.beta.messages.count_tokens(**asked).input_tokens


def refusals() -> None:
    for change, kind in (
        ({"model": "no-such-model"}, anthropic.NotFoundError),
        ({"extra_body": {"temperature": -1}}, anthropic.BadRequestError),
    ):
        try:
            client.messages.create(**{**ASKED, **change})
        except kind as error:
            assert error.body["type"] == "error" and error.body["error"]["message"]
        else:
            raise AssertionError(f"{kind.__name__} was expected")


async def without_waiting() -> None:
    """The same routes by the asynchronous client."""
    async with anthropic.AsyncAnthropic(**OPTIONS) as other:
        assert (await other.messages.create(**ASKED)).content
        kinds = [event.type async for event in await other.messages.create(**ASKED, stream=True)]
        assert (kinds[0], kinds[-1]) == ("message_start", "message_stop")
        async with other.messages.stream(**ASKED) as stream:
            assert await stream.get_final_text()
        asked = {name: ASKED[name] for name in ("model", "messages")}
        assert (await other.messages.count_tokens(**asked)).input_tokens


checks.run(
    models,
    messages,
    messages_streamed,
    by_the_streaming_helper,
    tools,
    tools_streamed,
    parsed,
    thinking,
    tokens_are_counted,
    beta_routes,
    refusals,
    without_waiting,
)
checks.tell(anthropic.__version__)
