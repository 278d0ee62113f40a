"""POST /v1/score and /rerank: how well texts fit each other, and documents in the order of how well they fit a query.

The score is what a model with a head of one label says of both texts, read at once (a cross-encoder), else the cosine
of two embeddings, in [-1, 1]. `/rerank` answers as Jina's and Cohere's do."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable, Sequence
from typing import Any, Literal

import msgspec
from fastapi import FastAPI, Request
from fastapi.responses import Response
from pydantic import AliasChoices, Field

from engine.errors import InvalidRequestError
from engine.frontend.pairs import pair_prompt
from engine.pooling import PoolingParams, PoolingRequestOutput, pairs_of, scores_pairs, similarity
from entrypoints.server.context import EnginePrompt, ServerContext
from entrypoints.server.embeddings import EmbeddingUsage
from entrypoints.server.encoding import json_response
from entrypoints.server.fields import NoEffect, Texts
from entrypoints.server.pooled import PooledFields, vectors_of
from entrypoints.server.responses import new_id, now
from entrypoints.server.streaming import answer

SCORE_PATHS = ("/v1/score", "/score")
RERANK_PATHS = ("/v1/rerank", "/rerank", "/v2/rerank")
COHERES = "/v2/rerank"


class ScoredFields(PooledFields):
    use_activation: bool | None = Field(default=None, validation_alias=AliasChoices("use_activation", "activation"))
    """false: what a cross-encoder's head says as it is"""


class ScoreRequest(ScoredFields):
    text_1: str | Texts = Field(validation_alias=AliasChoices("text_1", "queries", "data_1"))
    text_2: str | Texts = Field(validation_alias=AliasChoices("text_2", "documents", "items", "data_2"))


class Score(msgspec.Struct):
    index: int
    score: float
    object: str = "score"


class ScoreList(msgspec.Struct):
    id: str
    created: int
    model: str
    data: list[Score]
    usage: EmbeddingUsage
    object: str = "list"


class RerankRequest(ScoredFields):
    query: str
    documents: list[str | dict[str, Any]] = Field(min_length=1)
    """texts, or objects with a `text`"""
    top_n: int | None = Field(default=None, ge=1)
    return_documents: bool | None = None
    """left out: yes, as Jina; no at /v2/rerank, as Cohere"""
    max_tokens_per_doc: int | None = Field(default=None, ge=1)
    max_chunks_per_doc: NoEffect = None
    rank_fields: NoEffect = None

    def texts(self) -> list[str]:
        """Raises `InvalidRequestError`."""
        found = [each if isinstance(each, str) else each.get("text") for each in self.documents]
        for index, text in enumerate(found):
            if not isinstance(text, str):
                raise InvalidRequestError(f"documents[{index}] must be a text, or an object with a text", "documents")
        return [text for text in found if isinstance(text, str)]


class Document(msgspec.Struct):
    text: str


class Ranked(msgspec.Struct, omit_defaults=True):
    index: int
    relevance_score: float
    document: Document | None = None


class BilledUnits(msgspec.Struct, frozen=True):
    search_units: int = 1


class ApiVersion(msgspec.Struct, frozen=True):
    version: Literal["2"] = "2"


class RerankMeta(msgspec.Struct, frozen=True):
    api_version: ApiVersion = ApiVersion()
    billed_units: BilledUnits = BilledUnits()


class Ranking(msgspec.Struct):
    id: str
    model: str
    results: list[Ranked]
    usage: EmbeddingUsage
    meta: RerankMeta = RerankMeta()
    object: str = "list"


class Compared(msgspec.Struct, frozen=True):
    scores: list[float]
    usage: EmbeddingUsage

    @classmethod
    def by(cls, outputs: Sequence[PoolingRequestOutput], scores: Iterable[float]) -> Compared:
        tokens = sum(len(each.prompt_token_ids) for each in outputs)
        return cls(list(scores), EmbeddingUsage(tokens, tokens))


class Side(msgspec.Struct, frozen=True):
    """Of a comparison: a text, or several, and the field that holds them. `most_tokens`: that each is cut to, in place
    of what the body says of all."""

    field: str
    given: str | list[str]
    most_tokens: int | None = None

    @property
    def texts(self) -> list[str]:
        return [self.given] if isinstance(self.given, str) else self.given

    def place(self, index: int) -> str:
        return self.field if isinstance(self.given, str) else f"{self.field}[{index}]"

    def params(self, body: PooledFields) -> list[PoolingParams]:
        most = body.truncate_prompt_tokens if self.most_tokens is None else self.most_tokens
        return [PoolingParams(normalize=True, truncate_prompt_tokens=most)] * len(self.texts)


async def compared(
    context: ServerContext, one: Side, other: Side, pairs: Sequence[tuple[int, int]], body: ScoredFields, name: str
) -> Compared:
    """The scores of `pairs` of their texts, in that order. Raises what `vectors_of` raises."""
    context.engine.config.limits.check("prompts", max(len(one.texts), len(other.texts)), other.field)
    if scores_pairs(context.engine.model.head):
        return await _read_at_once(context, one, other, pairs, body, name)
    if body.use_activation is not None:
        raise InvalidRequestError("use_activation is of models that read both texts at once", "use_activation")
    return await _by_their_embeddings(context, one, other, pairs, body, name)


async def _read_at_once(
    context: ServerContext, one: Side, other: Side, pairs: Sequence[tuple[int, int]], body: ScoredFields, name: str
) -> Compared:
    engine, most = context.engine, body.truncate_prompt_tokens
    ones, others = one.texts, other.texts
    params = PoolingParams(task="classify", use_activation=body.use_activation, truncate_prompt_tokens=most)
    prompts: list[EnginePrompt] = []
    for first, second in pairs:
        prompt = await asyncio.to_thread(
            pair_prompt,
            engine.tokenizer,
            engine.model.facts,
            engine.config,
            ones[first],
            others[second],
            most,
            other.most_tokens,
            (one.field, other.field),
        )
        prompts.append(prompt)

    def place(index: int) -> str:
        return other.place(pairs[index][1])

    outputs = await vectors_of(context, prompts, [params] * len(pairs), body, name, place)
    return Compared.by(outputs, (float(each.outputs.data[0]) for each in outputs))


async def _by_their_embeddings(
    context: ServerContext, one: Side, other: Side, pairs: Sequence[tuple[int, int]], body: ScoredFields, name: str
) -> Compared:
    """What the model's files put before queries stands before `one`'s texts, before documents before `other`'s."""
    ones, others = one.texts, other.texts
    before = context.engine.model.pooling.prompts
    texts = [before.get("query", "") + text for text in ones] + [before.get("document", "") + text for text in others]

    def place(index: int) -> str:
        return one.place(index) if index < len(ones) else other.place(index - len(ones))

    params = one.params(body) + other.params(body)
    found = await vectors_of(context, texts, params, body, name, place)
    data = [each.outputs.data for each in found]
    return Compared.by(found, (similarity(data[first], data[len(ones) + second]) for first, second in pairs))


async def create_scores(context: ServerContext, body: ScoreRequest) -> ScoreList:
    one, other = Side("text_1", body.text_1), Side("text_2", body.text_2)
    pairs, name = pairs_of(one.texts, other.texts), new_id("score")
    found = await compared(context, one, other, pairs, body, name)
    scores = [Score(index, score) for index, score in enumerate(found.scores)]
    return ScoreList(name, now(), context.served_name, scores, found.usage)


async def create_ranking(context: ServerContext, body: RerankRequest, *, show: bool) -> Ranking:
    texts, name = body.texts(), new_id("rerank")
    documents = Side("documents", texts, body.max_tokens_per_doc)
    pairs = [(0, index) for index in range(len(texts))]
    found = await compared(context, Side("query", body.query), documents, pairs, body, name)
    ranked = [Ranked(i, found.scores[i], Document(text) if show else None) for i, text in enumerate(texts)]
    ranked.sort(key=lambda each: -each.relevance_score)
    return Ranking(name, context.served_name, ranked[: body.top_n], found.usage)


def add_routes(app: FastAPI, context: ServerContext) -> None:
    async def score(body: ScoreRequest, request: Request) -> Response:
        context.take_note(body, request)
        context.check_model(body.model)
        return json_response(await answer(request, create_scores(context, body)))

    async def rerank(body: RerankRequest, request: Request) -> Response:
        context.take_note(body, request)
        context.check_model(body.model)
        show = body.return_documents
        if show is None:
            show = request.url.path != COHERES
        return json_response(await answer(request, create_ranking(context, body, show=show)))

    for path in SCORE_PATHS:
        app.post(path)(score)
    for path in RERANK_PATHS:
        app.post(path)(rerank)
