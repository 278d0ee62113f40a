"""litellm as a client: its providers for OpenAI's routes, for vLLM and for Anthropic's, and its proxy-less router."""

from __future__ import annotations

import asyncio
import json
from importlib.metadata import version

import litellm
from checks import Checks
from pydantic import BaseModel, Field

checks = Checks()
V1 = {"api_base": f"{checks.base}/v1", "api_key": "none", "num_retries": 0}
ASKED = [{"role": "user", "content": "What is the capital of France? Answer in one sentence."}]
PLACE = {
    "type": "object",
    "properties": {"city": {"enum": ["Paris", "Rome"]}, "days": {"type": "integer", "minimum": 1, "maximum": 7}},
    "required": ["city", "days"],
    "additionalProperties": False,
}
TOOL = {"type": "function", "function": {"name": "get_weather", "description": "Weather.", "parameters": PLACE}}
OPENAI, VLLM = f"openai/{checks.model}", f"hosted_vllm/{checks.model}"


class Place(BaseModel):
    city: str = Field(max_length=12)
    days: int = Field(ge=1, le=7)


def chat() -> None:
    for name in (OPENAI, VLLM):
        reply = litellm.completion(name, ASKED, max_tokens=32, **V1)
        assert "Paris" in reply.choices[0].message.content and reply.usage.prompt_tokens > 5


def chat_streamed() -> None:
    for name in (OPENAI, VLLM):
        stream = litellm.completion(
            name, ASKED, max_tokens=32, stream=True, stream_options={"include_usage": True}, **V1
        )
        chunks = list(stream)
        assert "Paris" in "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices)
        assert litellm.stream_chunk_builder(chunks, messages=ASKED).usage.completion_tokens > 0


def tools() -> None:
    for name in (OPENAI, VLLM):
        for choice in ("required", {"type": "function", "function": {"name": "get_weather"}}):
            reply = litellm.completion(name, ASKED, tools=[TOOL], tool_choice=choice, max_tokens=200, **V1)
            for call in reply.choices[0].message.tool_calls:
                assert json.loads(call.function.arguments)["city"] in ("Paris", "Rome")


def formats() -> None:
    schema = {"type": "json_schema", "json_schema": {"name": "place", "schema": PLACE, "strict": True}}
    for name in (OPENAI, VLLM):
        for form in (Place, schema):
            reply = litellm.completion(name, ASKED, response_format=form, max_tokens=64, **V1)
            Place.model_validate_json(reply.choices[0].message.content)
    reply = litellm.completion(OPENAI, ASKED, response_format={"type": "json_object"}, max_tokens=200, **V1)
    assert reply.choices[0].message.content.lstrip().startswith("{")


def text_completion() -> None:
    reply = litellm.text_completion(
        model=f"text-completion-openai/{checks.model}", prompt="One, two,", max_tokens=4, **V1
    )
    assert reply.choices[0].text


def responses() -> None:
    reply = litellm.responses(
        "What is the capital of France? Answer in one sentence.", OPENAI, max_output_tokens=32, **V1
    )
    assert "Paris" in reply.output[0].content[0].text
    kinds = [event.type for event in litellm.responses("Hello", OPENAI, max_output_tokens=16, stream=True, **V1)]
    assert kinds[-1] in ("response.completed", "response.incomplete")


def anthropics_route() -> None:
    options = {"api_base": checks.base, "api_key": "none", "max_tokens": 64}
    name = f"anthropic/{checks.model}"
    assert "Paris" in litellm.completion(name, ASKED, **options).choices[0].message.content
    text = "".join(c.choices[0].delta.content or "" for c in litellm.completion(name, ASKED, stream=True, **options))
    assert "Paris" in text
    reply = litellm.completion(name, ASKED, tools=[TOOL], tool_choice="required", **options | {"max_tokens": 200})
    assert reply.choices[0].message.tool_calls


def without_waiting() -> None:
    async def go() -> None:
        reply = await litellm.acompletion(OPENAI, ASKED, max_tokens=32, **V1)
        assert "Paris" in reply.choices[0].message.content
        router = litellm.Router([{"model_name": "it", "litellm_params": {"model": OPENAI, **V1}}])
        assert (await router.acompletion("it", ASKED, max_tokens=8)).choices

    asyncio.run(go())


def refusals() -> None:
    for change, kind in (
        ({"temperature": -1}, litellm.BadRequestError),
        ({"messages": [{"role": "user", "content": "word " * 9000}]}, litellm.ContextWindowExceededError),
    ):
        try:
            litellm.completion(**{"model": OPENAI, "messages": ASKED, **V1, **change})
        except kind:
            continue
        raise AssertionError(f"{kind.__name__} was expected")


checks.run(chat, chat_streamed, tools, formats, text_completion, responses, anthropics_route, without_waiting, refusals)
checks.tell(version("litellm"))
