"""Ollama's `/api/embed`, and `/api/embeddings`, which came before it: texts as vectors."""

from __future__ import annotations

import time
from collections.abc import Sequence

import msgspec
from pydantic import Field

from engine.pooling import PoolingParams, PoolingRequestOutput
from entrypoints.server.context import ServerContext
from entrypoints.server.fields import NoEffect, Texts
from entrypoints.server.ollama_api.fields import Options
from entrypoints.server.pooled import PooledFields, vectors_of, written
from entrypoints.server.responses import new_id


class EmbedFields(PooledFields):
    """`options` are those of answers, and have no effect on vectors."""

    options: Options = Field(default_factory=Options)
    keep_alive: NoEffect = None


class EmbedRequest(EmbedFields):
    input: str | Texts = ""
    truncate: bool = True
    """longer texts lose their end; otherwise they are refused"""
    dimensions: int | None = None

    def texts(self) -> list[str]:
        given = [self.input] if isinstance(self.input, str) else self.input
        return [] if given == [""] else given


class EmbedOneRequest(EmbedFields):
    prompt: str = ""


class Embedded(msgspec.Struct):
    model: str
    embeddings: list[msgspec.Raw]
    total_duration: int
    load_duration: int
    prompt_eval_count: int


class EmbeddedSchema(Embedded):
    """What `Embedded` reads as: its vectors are written one by one, for the sake of others on the event loop."""

    embeddings: list[list[float]]  # type: ignore[assignment]


class OneEmbedded(msgspec.Struct):
    embedding: list[float]


async def embed(context: ServerContext, body: EmbedRequest) -> Embedded:
    """Of length 1. Raises what `vectors_of` raises."""
    started_ns = time.monotonic_ns()
    most = body.truncate_prompt_tokens
    if most is None and body.truncate:
        most = -1
    params = PoolingParams(
        normalize=True, dimensions=body.dimensions or None, truncate_prompt_tokens=most, task="embed"
    )
    outputs = await _vectors(context, body.texts(), params, body, "input")
    vectors = await written(output.outputs.data.tolist() for output in outputs)
    tokens = sum(len(output.prompt_token_ids) for output in outputs)
    name = body.model or context.served_name
    return Embedded(name, vectors, time.monotonic_ns() - started_ns, 0, tokens)


async def embed_one(context: ServerContext, body: EmbedOneRequest) -> OneEmbedded:
    """As the model's files say. Raises what `vectors_of` raises."""
    texts = [body.prompt] if body.prompt else []
    most = body.truncate_prompt_tokens
    params = PoolingParams(truncate_prompt_tokens=-1 if most is None else most, task="embed")
    outputs = await _vectors(context, texts, params, body, "prompt")
    return OneEmbedded(outputs[0].outputs.data.tolist() if outputs else [])


async def _vectors(
    context: ServerContext, texts: Sequence[str], params: PoolingParams, body: EmbedFields, field: str
) -> list[PoolingRequestOutput]:
    context.engine.config.limits.check("prompts", len(texts), field)
    one, each = isinstance(getattr(body, field), str), [params] * len(texts)
    return await vectors_of(context, texts, each, body, new_id("embd"), lambda i: field if one else f"{field}[{i}]")
