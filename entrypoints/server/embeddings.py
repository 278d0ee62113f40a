"""POST /v1/embeddings: texts, token ids or a conversation, each as a vector."""

from __future__ import annotations

import base64
from typing import Literal

import msgspec
import numpy as np
from fastapi import FastAPI, Request
from fastapi.responses import Response

from engine.errors import InvalidRequestError
from engine.pooling import PoolingParams
from entrypoints.server.context import ServerContext
from entrypoints.server.encoding import json_response
from entrypoints.server.pooled import vectors_of, written
from entrypoints.server.pooled_inputs import InputFields, prompts_of
from entrypoints.server.responses import new_id
from entrypoints.server.streaming import answer

PATH = "/v1/embeddings"


class EmbeddingsRequest(InputFields):
    encoding_format: Literal["float", "base64"] = "float"
    """base64: of float32, little-endian"""
    dimensions: int | None = None
    """the first ones, for models that were trained so"""
    normalize: bool | None = None
    prompt_name: str | None = None
    """what the model's files put before a text, by the use that it is made for: "query", "document" """


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
        normalize=body.normalize,
        dimensions=body.dimensions,
        truncate_prompt_tokens=body.truncate_prompt_tokens,
        task="embed",
    )
    prompts = await prompts_of(context, body, _before(context, body))
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


def _before(context: ServerContext, body: EmbeddingsRequest) -> str:
    if body.messages is not None:
        return ""
    pooling = context.engine.model.pooling
    if body.prompt_name is None:
        return pooling.before
    if body.prompt_name not in pooling.prompts:
        names = ", ".join(pooling.prompts) or "none"
        raise InvalidRequestError(f"prompt_name: this model's files name {names}", "prompt_name")
    return pooling.prompts[body.prompt_name]


def add_routes(app: FastAPI, context: ServerContext) -> None:
    @app.post(PATH)
    async def embeddings(body: EmbeddingsRequest, request: Request) -> Response:
        context.take_note(body, request)
        context.check_model(body.model)
        return json_response(await answer(request, create_embeddings(context, body)))
