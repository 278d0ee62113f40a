"""langchain-openai: ChatOpenAI by chat completions and by responses, OpenAI's completions, structured output in its
three methods, tools."""

from __future__ import annotations

import asyncio
from importlib.metadata import version
from typing import Literal

from checks import Checks
from langchain_core.messages import HumanMessage, SystemMessage, ToolMessage
from langchain_core.tools import tool
from langchain_openai import ChatOpenAI, OpenAI
from pydantic import BaseModel

checks = Checks()
OPTIONS = {"base_url": f"{checks.base}/v1", "api_key": "none", "model": checks.model, "max_retries": 0}
chat = ChatOpenAI(**OPTIONS, stream_usage=True, max_tokens=200)
through_responses = ChatOpenAI(**OPTIONS, max_tokens=200, stream_usage=True, use_responses_api=True)
ASKED = [SystemMessage("Be short."), HumanMessage("What is the capital of France? Answer in one sentence.")]


class Place(BaseModel):
    """A city to go to."""

    city: Literal["Paris", "Rome"]
    days: int


@tool
def get_weather(city: Literal["Paris", "Rome"]) -> str:
    """Weather of a city."""
    return f"{city} is sunny"


def invoke() -> None:
    for model in (chat, through_responses):
        reply = model.invoke(ASKED)
        assert "Paris" in reply.text and reply.usage_metadata["input_tokens"] > 5


def stream() -> None:
    for model in (chat, through_responses):
        whole = None
        for part in model.stream(ASKED):
            whole = part if whole is None else whole + part
        assert "Paris" in whole.text and whole.usage_metadata["output_tokens"] > 0


def batch_and_async() -> None:
    assert len(chat.batch([ASKED, ASKED])) == 2

    async def go() -> None:
        assert "Paris" in (await chat.ainvoke(ASKED)).text
        assert "Paris" in "".join([part.text async for part in chat.astream(ASKED)])

    asyncio.run(go())


def logprobs_and_stop() -> None:
    reply = chat.bind(logprobs=True, top_logprobs=2, stop=["."]).invoke(ASKED)
    assert len(reply.response_metadata["logprobs"]["content"][0]["top_logprobs"]) == 2 and "." not in reply.text


def structured_by_json_schema() -> None:
    for model in (chat, through_responses):
        for strict in (None, True):
            made = model.with_structured_output(Place, method="json_schema", strict=strict).invoke(ASKED)
            assert isinstance(made, Place)
    raw = chat.with_structured_output(Place.model_json_schema(), method="json_schema", include_raw=True).invoke(ASKED)
    assert raw["parsed"]["city"] and raw["parsing_error"] is None


def structured_by_function_calling() -> None:
    for model in (chat, through_responses):
        for strict in (None, True):
            made = model.with_structured_output(Place, method="function_calling", strict=strict).invoke(ASKED)
            assert isinstance(made, Place)


def structured_by_json_mode() -> None:
    """Nothing holds the answer to a schema but the prompt: it is JSON, whatever is in it."""
    made = chat.with_structured_output(None, method="json_mode").invoke([*ASKED, HumanMessage("As JSON.")])
    assert isinstance(made, dict)


def bind_tools() -> None:
    for model in (chat, through_responses):
        for choice in ("any", "get_weather", "required"):
            bound = model.bind_tools([get_weather], tool_choice=choice, parallel_tool_calls=False)
            (call,) = (reply := bound.invoke(ASKED)).tool_calls
            assert call["name"] == "get_weather" and call["args"]["city"] in ("Paris", "Rome")
        result = get_weather.invoke(call)
        assert isinstance(result, ToolMessage)
        after = model.bind_tools([get_weather]).invoke([*ASKED, reply, result])
        assert after.usage_metadata["output_tokens"] > 0


def bind_tools_streamed() -> None:
    bound = chat.bind_tools([get_weather], tool_choice="any", parallel_tool_calls=False)
    whole = None
    for part in bound.stream(ASKED):
        whole = part if whole is None else whole + part
    assert whole.tool_calls[0]["args"]["city"] in ("Paris", "Rome")


def completions() -> None:
    model = OpenAI(**OPTIONS, max_tokens=8, temperature=0)
    assert model.invoke("The capital of France is")
    assert "".join(model.stream("The capital of France is"))
    assert len(model.generate(["One,", "Two,"]).generations) == 2


checks.run(
    invoke,
    stream,
    batch_and_async,
    logprobs_and_stop,
    structured_by_json_schema,
    structured_by_function_calling,
    structured_by_json_mode,
    bind_tools,
    bind_tools_streamed,
    completions,
)
checks.tell(version("langchain-openai"))
