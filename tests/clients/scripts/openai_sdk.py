"""openai-python as a strict client: every answer and every event must be of its own types."""

from __future__ import annotations

import json

import openai
from checks import Checks
from pydantic import BaseModel, Field

checks = Checks()
MODEL = checks.model
OPTIONS = {"base_url": f"{checks.base}/v1", "api_key": "none", "max_retries": 0, "_strict_response_validation": True}
client = openai.OpenAI(**OPTIONS)
lenient = openai.OpenAI(**{**OPTIONS, "_strict_response_validation": False})
"""Of completions two things are null as OpenAI sends them, and by its types are not: the first token's log-probability,
and, until 2.0, a chunk's finish_reason."""
ASKED = [{"role": "system", "content": "Be short."}, {"role": "user", "content": "What is the capital of France?"}]
PLACE = {
    "type": "object",
    "properties": {"city": {"enum": ["Paris", "Rome"]}, "days": {"type": "integer", "minimum": 1, "maximum": 7}},
    "required": ["city", "days"],
    "additionalProperties": False,
}
WEATHER = {"name": "get_weather", "description": "Weather of a city.", "parameters": PLACE, "strict": True}
TOOL = {"type": "function", "function": WEATHER}


class Place(BaseModel):
    city: str = Field(max_length=12)
    days: int = Field(ge=1, le=7)


def called(arguments: str) -> None:
    given = json.loads(arguments)
    assert given["city"] in ("Paris", "Rome") and 1 <= given["days"] <= 7, given


def models() -> None:
    assert MODEL in [model.id for model in client.models.list()]
    assert client.models.retrieve(MODEL).id == MODEL


def chat() -> None:
    reply = client.chat.completions.create(
        model=MODEL, messages=ASKED, max_completion_tokens=32, n=2, logprobs=True, top_logprobs=2, seed=1, user="u"
    )
    assert [choice.index for choice in reply.choices] == [0, 1]
    assert "Paris" in reply.choices[0].message.content
    assert len(reply.choices[0].logprobs.content[0].top_logprobs) == 2


def chat_streamed() -> None:
    whole = client.chat.completions.create(model=MODEL, messages=ASKED, max_tokens=24, temperature=0)
    chunks = list(
        client.chat.completions.create(
            model=MODEL,
            messages=ASKED,
            max_tokens=24,
            temperature=0,
            stream=True,
            stream_options={"include_usage": True},
            logprobs=True,
        )
    )
    text = "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices)
    assert text == whole.choices[0].message.content
    assert chunks[-1].usage == whole.usage or chunks[-1].usage.completion_tokens == whole.usage.completion_tokens


def chat_by_the_streaming_helper() -> None:
    with client.chat.completions.stream(model=MODEL, messages=ASKED, max_tokens=24, response_format=Place) as stream:
        for _ in stream:
            pass
        assert isinstance(stream.get_final_completion().choices[0].message.parsed, Place)


def chat_parsed() -> None:
    reply = client.chat.completions.parse(model=MODEL, messages=ASKED, max_tokens=64, response_format=Place)
    assert isinstance(reply.choices[0].message.parsed, Place)


def chat_tools() -> None:
    options = {"model": MODEL, "messages": ASKED, "tools": [TOOL], "parallel_tool_calls": False, "max_tokens": 100}
    for choice in ("required", {"type": "function", "function": {"name": "get_weather"}}):
        (call,) = client.chat.completions.create(tool_choice=choice, **options).choices[0].message.tool_calls
        called(call.function.arguments)
    parsed = client.chat.completions.parse(tool_choice="required", **options).choices[0].message.tool_calls
    assert parsed[0].function.parsed_arguments["days"] >= 1
    answered = [
        *ASKED,
        {"role": "assistant", "tool_calls": [call.model_dump()]},
        {"role": "tool", "tool_call_id": call.id, "content": "sunny"},
    ]
    assert client.chat.completions.create(**{**options, "messages": answered}).choices[0].finish_reason


def chat_tools_streamed() -> None:
    arguments, reasons = "", []
    for chunk in client.chat.completions.create(
        model=MODEL,
        messages=ASKED,
        tools=[TOOL],
        tool_choice="required",
        parallel_tool_calls=False,
        max_tokens=100,
        stream=True,
    ):
        choice = chunk.choices[0]
        arguments += "".join(call.function.arguments or "" for call in choice.delta.tool_calls or [])
        reasons.append(choice.finish_reason)
    called(arguments)
    assert reasons[-1] == "tool_calls"


def completions() -> None:
    asked = {"model": MODEL, "prompt": "The capital of France is", "max_tokens": 8, "temperature": 0}
    scored = client.completions.create(**asked, logprobs=2)
    assert len(scored.choices[0].logprobs.token_logprobs) == 8
    echoed = lenient.completions.create(**asked, logprobs=2, echo=True).choices[0]
    assert echoed.text.startswith(asked["prompt"]) and echoed.logprobs.token_logprobs[0] is None
    chunks = list(lenient.completions.create(**asked, stream=True))
    assert "".join(chunk.choices[0].text for chunk in chunks) == scored.choices[0].text
    many = client.completions.create(**{**asked, "prompt": ["One, two,", "Red, green,"]}, n=2)
    assert [choice.index for choice in many.choices] == [0, 1, 2, 3]


def responses() -> None:
    reply = client.responses.create(model=MODEL, instructions="Be short.", input="What is the capital of France?")
    assert reply.status == "completed" and "Paris" in reply.output_text
    assert client.responses.retrieve(reply.id).output_text == reply.output_text
    assert len(client.responses.input_items.list(reply.id).data) == 1
    further = client.responses.create(model=MODEL, input="And of Italy?", previous_response_id=reply.id, store=False)
    assert further.usage.input_tokens > reply.usage.input_tokens
    client.responses.delete(reply.id)


def responses_streamed() -> None:
    events = list(client.responses.create(model=MODEL, input="Say hello.", stream=True, max_output_tokens=32))
    kinds = [event.type for event in events]
    assert kinds[0] == "response.created" and kinds[-1] in ("response.completed", "response.incomplete"), kinds
    text = "".join(event.delta for event in events if event.type == "response.output_text.delta")
    assert text == events[-1].response.output_text
    assert [event.sequence_number for event in events] == list(range(len(events)))


def responses_parsed() -> None:
    reply = client.responses.parse(model=MODEL, input="A trip to Paris.", text_format=Place, max_output_tokens=64)
    assert isinstance(reply.output_parsed, Place)
    with client.responses.stream(model=MODEL, input="A trip.", text_format=Place, max_output_tokens=64) as stream:
        for _ in stream:
            pass
        assert isinstance(stream.get_final_response().output_parsed, Place)


def responses_tools() -> None:
    tool = {"type": "function", **WEATHER}
    asked = {"model": MODEL, "tools": [tool], "input": "Weather in Rome?", "tool_choice": "required"}
    asked["parallel_tool_calls"] = False
    reply = client.responses.create(**asked, max_output_tokens=100)
    (call,) = (item for item in reply.output if item.type == "function_call")
    called(call.arguments)
    result = {"type": "function_call_output", "call_id": call.call_id, "output": "sunny"}
    told = [{"role": "user", "content": "Weather in Rome?"}, *reply.output, result]
    after = client.responses.create(model=MODEL, tools=[tool], input=told, max_output_tokens=32)
    assert after.output
    events = list(client.responses.create(**asked, max_output_tokens=100, stream=True))
    (done,) = (event for event in events if event.type == "response.function_call_arguments.done")
    called(done.arguments)


def refusals() -> None:
    for body, kind in (
        ({"model": "no-such-model", "messages": ASKED}, openai.NotFoundError),
        ({"model": MODEL, "messages": ASKED, "temperature": -1}, openai.BadRequestError),
    ):
        try:
            client.chat.completions.create(**body)
        except kind as error:
            assert error.body["message"]
        else:
            raise AssertionError(f"{kind.__name__} was expected")


async def without_waiting() -> None:
    """The same routes by the asynchronous client."""
    async with openai.AsyncOpenAI(**OPTIONS) as other:
        reply = await other.chat.completions.create(model=MODEL, messages=ASKED, max_tokens=16)
        assert reply.choices[0].message.content
        text = ""
        async for chunk in await other.chat.completions.create(model=MODEL, messages=ASKED, max_tokens=16, stream=True):
            text += chunk.choices[0].delta.content or ""
        assert text
        assert (await other.completions.create(model=MODEL, prompt="One, two,", max_tokens=4)).choices[0].text
        assert (await other.responses.create(model=MODEL, input="Say hello.", max_output_tokens=16)).output
        stream = await other.responses.create(model=MODEL, input="Say hello.", max_output_tokens=16, stream=True)
        kinds = [event.type async for event in stream]
        assert kinds[0] == "response.created" and kinds[-1] in ("response.completed", "response.incomplete")


checks.run(
    models,
    chat,
    chat_streamed,
    chat_by_the_streaming_helper,
    chat_parsed,
    chat_tools,
    chat_tools_streamed,
    completions,
    responses,
    responses_streamed,
    responses_parsed,
    responses_tools,
    refusals,
    without_waiting,
)
checks.tell(openai.__version__)
