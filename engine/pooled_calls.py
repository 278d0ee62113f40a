"""The calls of `LLM` that make vectors of prompts."""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence

from msgspec.structs import replace

from engine.errors import InvalidRequestError
from engine.frontend.admission import PROMPT_ONLY, AdmittedRequest, ParsedPrompt, Prompt, naming_prompt, parse_prompts
from engine.frontend.texts import check_text
from engine.pooling import (
    EmbeddingRequestOutput,
    PooledRequestOutput,
    PoolingParams,
    PoolingRequestOutput,
    PoolingTask,
    ScoringOutput,
    ScoringRequestOutput,
    embedding_output,
    pairs_of,
    pooled_output,
    similarity,
)
from engine.request import RequestOutput
from engine.session import Session


class PooledCalls(ABC):
    @abstractmethod
    def _alive(self) -> Session: ...
    @abstractmethod
    def _number_call(self) -> int: ...
    @abstractmethod
    def _token_ids(self, prompts: Sequence[ParsedPrompt]) -> Iterator[list[int]]: ...
    @abstractmethod
    def _run(self, admitted: list[AdmittedRequest], arrival: float, use_tqdm: bool) -> list[RequestOutput]: ...

    def encode(
        self,
        prompts: Prompt | Sequence[Prompt],
        pooling_params: PoolingParams | None = None,
        *,
        use_tqdm: bool = True,
        pooling_task: PoolingTask | None = None,
    ) -> list[PoolingRequestOutput]:
        """Each prompt as a vector, or with `pooling_task="token_embed"` each of its tokens; in the order of the
        prompts. Raises `InvalidRequestError`, or `RequestFailedError` where one fails."""
        session, arrival = self._alive(), time.monotonic()
        if pooling_task is not None:
            pooling_params = replace(pooling_params or PoolingParams(), task=pooling_task)
        pooling = session.resolve_pooling(pooling_params)
        parsed, call = parse_prompts(prompts), self._number_call()
        admitted = []
        for i, (prompt, ids) in enumerate(zip(parsed, self._token_ids(parsed), strict=True)):
            with naming_prompt(i, len(parsed)):
                salt = None if prompt.cache_salt is None else check_text(prompt.cache_salt, "cache_salt")
                kept = session.truncated(ids, pooling_params)
                admitted.append(
                    session.admission.admit(
                        f"{call}.{i}", prompt.text, kept, PROMPT_ONLY, cache_salt=salt, pooling=pooling.kind
                    )
                )
        return [pooled_output(output, pooling) for output in self._run(admitted, arrival, use_tqdm)]

    def embed(
        self,
        prompts: Prompt | Sequence[Prompt],
        pooling_params: PoolingParams | None = None,
        *,
        use_tqdm: bool = True,
    ) -> list[EmbeddingRequestOutput]:
        """Each prompt as a list of floats; raises as `encode`."""
        return [embedding_output(each) for each in self.encode(prompts, pooling_params, use_tqdm=use_tqdm)]

    def score(
        self, data_1: str | Sequence[str], data_2: str | Sequence[str], *, use_tqdm: bool = True
    ) -> list[ScoringRequestOutput]:
        """How alike texts are: one and each of many, or as many pairs; the cosine of their embeddings. What the model's
        files put before queries goes before `data_1`, what they put before documents before `data_2`. Raises as
        `encode`."""
        ones = [data_1] if isinstance(data_1, str) else list(data_1)
        others = [data_2] if isinstance(data_2, str) else list(data_2)
        pairs = pairs_of(ones, others)
        prompts = self._alive().model.pooling.prompts
        texts = [prompts.get("query", "") + text for text in ones] + [prompts.get("document", "") + o for o in others]
        found = self.encode(texts, PoolingParams(normalize=True), use_tqdm=use_tqdm)
        return [
            PooledRequestOutput(
                request_id=found[one].request_id,
                outputs=ScoringOutput(similarity(found[one].outputs.data, found[len(ones) + other].outputs.data)),
                prompt_token_ids=found[one].prompt_token_ids + found[len(ones) + other].prompt_token_ids,
                num_cached_tokens=found[one].num_cached_tokens + found[len(ones) + other].num_cached_tokens,
            )
            for one, other in pairs
        ]

    def classify(self, *_: object, **__: object) -> None:
        """Raises `InvalidRequestError`: no model with a classifier is supported."""
        raise InvalidRequestError("classify needs a model with a classifier, and none is supported", "model")
