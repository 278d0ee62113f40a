"""llama-index: OpenAILike by chat and by completions, structured predictions, tools."""

import asyncio
from importlib.metadata import version
from typing import Literal

from checks import Checks
from llama_index.core.llms import ChatMessage
from llama_index.core.prompts import PromptTemplate
from llama_index.core.tools import FunctionTool
from llama_index.llms.openai_like import OpenAILike
from pydantic import BaseModel

checks = Checks()
OPTIONS = {
    "model": checks.model,
    "api_base": f"{checks.base}/v1",
    "api_key": "none",
    "max_tokens": 200,
    "max_retries": 0,
    "context_window": 4096,
    "is_function_calling_model": True,
}
chat = OpenAILike(**OPTIONS, is_chat_model=True)
text = OpenAILike(**OPTIONS | {"max_tokens": 8}, is_chat_model=False)
ASKED = [ChatMessage(role="user", content="What is the capital of France? Answer in one sentence.")]


class Place(BaseModel):
    """A city to go to."""

    city: Literal["Paris", "Rome"]
    sunny: bool


def get_weather(city: Literal["Paris", "Rome"]) -> str:
    """Weather of a city."""
    return f"{city} is sunny"


TOOL = FunctionTool.from_defaults(get_weather)


def chats() -> None:
    assert "Paris" in chat.chat(ASKED).message.content
    assert "Paris" in "".join(part.delta or "" for part in chat.stream_chat(ASKED))


def completes() -> None:
    assert text.complete("The capital of France is").text
    assert "".join(part.delta or "" for part in text.stream_complete("The capital of France is"))


def without_waiting() -> None:
    async def go() -> None:
        assert "Paris" in (await chat.achat(ASKED)).message.content
        parts = [part.delta or "" async for part in await chat.astream_chat(ASKED)]
        assert "Paris" in "".join(parts)

    asyncio.run(go())


def structured() -> None:
    for model in (chat, OpenAILike(**OPTIONS, is_chat_model=True, should_use_structured_outputs=True)):
        made = model.structured_predict(
            Place, PromptTemplate("Which city is the capital of {country}?"), country="France"
        )
        assert isinstance(made, Place)
        raw = model.as_structured_llm(Place).chat(ASKED).raw
        assert isinstance(raw, Place)


def tools() -> None:
    reply = chat.chat_with_tools([TOOL], chat_history=ASKED, tool_required=True, allow_parallel_tool_calls=False)
    (call,) = chat.get_tool_calls_from_response(reply)
    assert call.tool_kwargs["city"] in ("Paris", "Rome")
    result = ChatMessage(role="tool", content="sunny", additional_kwargs={"tool_call_id": call.tool_id})
    assert chat.chat_with_tools([TOOL], chat_history=[*ASKED, reply.message, result]).message is not None


def predict_and_call() -> None:
    reply = chat.predict_and_call([TOOL], "Weather in Rome?", tool_required=True, allow_parallel_tool_calls=False)
    assert "sunny" in str(reply)


checks.run(chats, completes, without_waiting, structured, tools, predict_and_call)
checks.tell(version("llama-index-llms-openai-like"))
