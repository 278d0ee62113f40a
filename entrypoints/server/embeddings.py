"""POST /v1/embeddings: texts, token ids or a conversation, each as a vector."""

from __future__ import annotations

import base64
from typing import Annotated, Any, Literal, Self

import msgspec
import numpy as np
from fastapi import FastAPI, Request
from fastapi.responses import Response
from pydantic import Field, model_validator

from engine.errors import InvalidRequestError
from engine.pooling import PoolingParams
from entrypoints.server.context import EnginePrompt, ServerContext
from entrypoints.server.encoding import json_response
from entrypoints.server.fields import Ids, Objects, Texts, refusal
from entrypoints.server.pooled import PooledFields, vectors_of, written
from entrypoints.server.prompting import Conversation
from entrypoints.server.responses import new_id
from entrypoints.server.streaming import answer

PATH = "/v1/embeddings"


class EmbeddingsRequest(PooledFields):
    """Either `input` or `messages`."""

    input: str | Ids | Texts | Annotated[list[Ids], Field(fail_fast=True)] | None = None
    messages: Objects | None = Field(default=None, min_length=1)
    encoding_format: Literal["float", "base64"] = "float"
    """base64: of float32, little-endian"""
    dimensions: int | None = None
    """the first ones, for models that were trained so"""
    normalize: bool | None = None
    prompt_name: str | None = None
    """what the model's files put before a text, by the use that it is made for: "query", "document" """
    add_special_tokens: bool | None = None
    add_generation_prompt: bool = False
    continue_final_message: bool = False
    chat_template_kwargs: dict[str, Any] | None = None

    @model_validator(mode="after")
    def _one_of_the_two(self) -> Self:
        if (self.input is None) == (self.messages is None):
            raise refusal("input", "give either input or messages")
        return self

    def inputs(self) -> list[str | list[int]]:
        """Raises `InvalidRequestError` where there is none."""
        if not self.input and not isinstance(self.input, str):
            raise InvalidRequestError("input must not be empty", "input")
        return [self.input] if self._is_one else self.input  # type: ignore[list-item,return-value]

    @property
    def _is_one(self) -> bool:
        """A text or its tokens."""
        return isinstance(self.input, str) or bool(self.input and isinstance(self.input[0], int))

    def place(self, index: int) -> str:
        if self.messages is not None:
            return "messages"
        return "input" if self._is_one else f"input[{index}]"

    def conversation(self) -> Conversation:
        return Conversation(
            messages=self.messages or [],
            add_generation_prompt=self.add_generation_prompt,
            continue_final_message=self.continue_final_message,
            template_kwargs=self.chat_template_kwargs or {},
            add_special_tokens=bool(self.add_special_tokens),
        )


class EmbeddingUsage(msgspec.Struct):
    prompt_tokens: int
    total_tokens: int


class Embedding(msgspec.Struct):
    index: int
    embedding: list[float] | str
    """a text with `encoding_format` base64"""
    object: str = "embedding"


class EmbeddingList(msgspec.Struct):
    data: list[msgspec.Raw]
    model: str
    usage: EmbeddingUsage
    object: str = "list"


class EmbeddingListSchema(EmbeddingList):
    """What `EmbeddingList` reads as: its data are written one by one, for the sake of others on the event loop."""

    data: list[Embedding]  # type: ignore[assignment]


async def create_embeddings(context: ServerContext, body: EmbeddingsRequest) -> EmbeddingList:
    """Raises what `vectors_of` raises."""
    params = PoolingParams(
        normalize=body.normalize, dimensions=body.dimensions, truncate_prompt_tokens=body.truncate_prompt_tokens
    )
    prompts = await _prompts(context, body)
    outputs = await vectors_of(context, prompts, [params] * len(prompts), body, new_id("embd"), body.place)
    base64s = body.encoding_format == "base64"
    data = await written(
        Embedding(index, _in_base64(output.outputs.data) if base64s else output.outputs.data.tolist())
        for index, output in enumerate(outputs)
    )
    tokens = sum(len(output.prompt_token_ids) for output in outputs)
    return EmbeddingList(data, context.served_name, EmbeddingUsage(tokens, tokens))


def _in_base64(vector: np.ndarray) -> str:
    return base64.b64encode(vector.astype(np.dtype("<f4")).tobytes()).decode()


async def _prompts(context: ServerContext, body: EmbeddingsRequest) -> list[EnginePrompt]:
    engine = context.engine
    if body.messages is not None:
        text, ids = await body.conversation().render(engine)
        return [{"prompt": text, "prompt_token_ids": ids}]
    before = ""
    if body.prompt_name is not None:
        known = engine.model.pooling.prompts
        if body.prompt_name not in known:
            names = ", ".join(known) or "none"
            raise InvalidRequestError(f"prompt_name: this model's files name {names}", "prompt_name")
        before = known[body.prompt_name]
    inputs = body.inputs()
    engine.config.limits.check("prompts", len(inputs), "input")
    prompts: list[EnginePrompt] = []
    for given in inputs:
        if not isinstance(given, str):
            prompts.append({"prompt_token_ids": given})
        elif body.add_special_tokens is False:
            prompts.append({"prompt_token_ids": await engine.tokenize(before + given, add_special_tokens=False)})
        else:
            prompts.append(before + given)
    return prompts


def add_routes(app: FastAPI, context: ServerContext) -> None:
    @app.post(PATH)
    async def embeddings(body: EmbeddingsRequest, request: Request) -> Response:
        context.take_note(body, request)
        context.check_model(body.model)
        return json_response(await answer(request, create_embeddings(context, body)))
