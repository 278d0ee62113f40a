"""POST /classify, what a model's head says of each text, and /pooling, whatever a model makes of prompts: vLLM's."""

from __future__ import annotations

from typing import Any

import msgspec
from fastapi import FastAPI, Request
from fastapi.responses import Response
from pydantic import AliasChoices, Field

from engine.errors import InvalidRequestError
from engine.models.heads import HeadSpec
from engine.pooling import PoolingParams, PoolingRequestOutput, PoolingTask
from entrypoints.server.context import ServerContext
from entrypoints.server.embeddings import EmbeddingUsage
from entrypoints.server.encoding import json_response
from entrypoints.server.pooled import vectors_of, written
from entrypoints.server.pooled_inputs import InputFields, prompts_of
from entrypoints.server.responses import new_id, now
from entrypoints.server.streaming import answer

CLASSIFY, POOLING = "/classify", "/pooling"


class ClassifyRequest(InputFields):
    use_activation: bool | None = Field(default=None, validation_alias=AliasChoices("use_activation", "activation"))
    """false: the head's outputs as they are"""

    def params(self) -> PoolingParams:
        most = self.truncate_prompt_tokens
        return PoolingParams(task="classify", use_activation=self.use_activation, truncate_prompt_tokens=most)


class Classified(msgspec.Struct):
    index: int
    label: str
    """the likeliest of them"""
    probs: list[float]
    num_classes: int


class Classes(msgspec.Struct):
    id: str
    created: int
    model: str
    data: list[Classified]
    usage: EmbeddingUsage
    object: str = "list"


class PoolingRequest(InputFields):
    task: PoolingTask | None = None
    """left out: what the model is for"""
    use_activation: bool | None = Field(default=None, validation_alias=AliasChoices("use_activation", "activation"))
    normalize: bool | None = None
    dimensions: int | None = None

    def params(self) -> PoolingParams:
        return PoolingParams(
            task=self.task,
            use_activation=self.use_activation,
            normalize=self.normalize,
            dimensions=self.dimensions,
            truncate_prompt_tokens=self.truncate_prompt_tokens,
        )


class Pooled(msgspec.Struct):
    index: int
    data: list[Any]
    """numbers, or a list of them for each token"""
    object: str = "pooling"


class PooledList(msgspec.Struct):
    id: str
    created: int
    model: str
    data: list[msgspec.Raw]
    usage: EmbeddingUsage
    object: str = "list"


class PooledListSchema(PooledList):
    """What `PooledList` reads as: its data are written one by one, for the sake of others on the event loop."""

    data: list[Pooled]  # type: ignore[assignment]


async def create_classes(context: ServerContext, body: ClassifyRequest) -> Classes:
    """Raises what `vectors_of` raises."""
    name, head = new_id("classify"), context.engine.model.head
    if head is not None and head.form.pooled == "all":
        raise InvalidRequestError(f'this model judges each token: {POOLING} says how (task "token_classify")', "model")
    outputs = await _outputs(context, body, body.params(), name)
    assert head is not None  # or nothing came
    data = [_classified(index, each, head) for index, each in enumerate(outputs)]
    return Classes(name, now(), context.served_name, data, _usage(outputs))


async def create_pooled(context: ServerContext, body: PoolingRequest) -> PooledList:
    """Raises what `vectors_of` raises."""
    name = new_id("pool")
    outputs = await _outputs(context, body, body.params(), name)
    data = await written(Pooled(index, each.outputs.data.tolist()) for index, each in enumerate(outputs))
    return PooledList(name, now(), context.served_name, data, _usage(outputs))


def _classified(index: int, output: PoolingRequestOutput, head: HeadSpec) -> Classified:
    probs = output.outputs.data
    return Classified(index, head.labels[int(probs.argmax())], probs.tolist(), len(probs))


async def _outputs(
    context: ServerContext, body: ClassifyRequest | PoolingRequest, params: PoolingParams, name: str
) -> list[PoolingRequestOutput]:
    prompts = await prompts_of(context, body)
    return await vectors_of(context, prompts, [params] * len(prompts), body, name, body.place)


def _usage(outputs: list[PoolingRequestOutput]) -> EmbeddingUsage:
    tokens = sum(len(each.prompt_token_ids) for each in outputs)
    return EmbeddingUsage(tokens, tokens)


def add_routes(app: FastAPI, context: ServerContext) -> None:
    @app.post(CLASSIFY)
    async def classify(body: ClassifyRequest, request: Request) -> Response:
        context.take_note(body, request)
        context.check_model(body.model)
        return json_response(await answer(request, create_classes(context, body)))

    @app.post(POOLING)
    async def pooling(body: PoolingRequest, request: Request) -> Response:
        context.take_note(body, request)
        context.check_model(body.model)
        return json_response(await answer(request, create_pooled(context, body)))
