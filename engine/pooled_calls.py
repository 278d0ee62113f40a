"""The calls of `LLM` that make vectors of prompts."""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence

from msgspec.structs import replace

from engine.errors import InvalidRequestError
from engine.frontend.admission import PROMPT_ONLY, AdmittedRequest, ParsedPrompt, Prompt, naming_prompt, parse_prompts
from engine.frontend.pairs import pair_prompt
from engine.frontend.texts import check_text
from engine.pooling import (
    ClassificationRequestOutput,
    EmbeddingRequestOutput,
    PooledRequestOutput,
    PoolingParams,
    PoolingRequestOutput,
    PoolingTask,
    ScoringOutput,
    ScoringRequestOutput,
    classification_output,
    embedding_output,
    pairs_of,
    pooled_output,
    scores_pairs,
    similarity,
)
from engine.request import RequestOutput, SamplingParams
from engine.session import Session


class PooledCalls(ABC):
    @abstractmethod
    def _alive(self) -> Session: ...
    @abstractmethod
    def _number_call(self) -> int: ...
    @abstractmethod
    def _token_ids(
        self, prompts: Sequence[ParsedPrompt], params: Sequence[SamplingParams | PoolingParams]
    ) -> Iterator[list[int]]: ...
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
        if pooling_task is not None:
            pooling_params = replace(pooling_params or PoolingParams(), task=pooling_task)
        return self._encode(parse_prompts(prompts), pooling_params, use_tqdm)

    def _encode(
        self, parsed: Sequence[ParsedPrompt], pooling_params: PoolingParams | None, use_tqdm: bool
    ) -> list[PoolingRequestOutput]:
        session, arrival = self._alive(), time.monotonic()
        pooling, call = session.resolve_pooling(pooling_params), self._number_call()
        admitted = []
        params = [pooling_params or PoolingParams()] * len(parsed)
        for i, (prompt, ids) in enumerate(zip(parsed, self._token_ids(parsed, params), strict=True)):
            with naming_prompt(i, len(parsed)):
                salt = None if prompt.cache_salt is None else check_text(prompt.cache_salt, "cache_salt")
                kept = session.truncated(ids, pooling_params)
                admitted.append(
                    session.admission.admit(
                        f"{call}.{i}",
                        prompt.text,
                        kept,
                        PROMPT_ONLY,
                        cache_salt=salt,
                        pooling=pooling.kind,
                        is_pair=prompt.is_pair,
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
        """Each prompt as a list of floats; before texts goes what the model's files put before them by default.
        Raises as `encode`."""
        before = self._alive().model.pooling.before
        parsed = [
            each if each.text is None or each.token_ids is not None else replace(each, text=before + each.text)
            for each in parse_prompts(prompts)
        ]
        params = replace(pooling_params or PoolingParams(), task="embed")
        return [embedding_output(each) for each in self._encode(parsed, params, use_tqdm)]

    def score(
        self,
        data_1: str | Sequence[str],
        data_2: str | Sequence[str],
        *,
        use_tqdm: bool = True,
        pooling_params: PoolingParams | None = None,
    ) -> list[ScoringRequestOutput]:
        """How well texts fit each other: one and each of many, or as many pairs. What a model with a head of one label
        says of both (a cross-encoder), else the cosine of their embeddings; then what the model's files put before
        queries goes before `data_1`, what they put before documents before `data_2`. `pooling_params`: a
        cross-encoder's. Raises as `encode`."""
        ones = [data_1] if isinstance(data_1, str) else list(data_1)
        others = [data_2] if isinstance(data_2, str) else list(data_2)
        pairs = pairs_of(ones, others)
        if scores_pairs(self._alive().model.head):
            return self._score_pairs([(ones[one], others[other]) for one, other in pairs], pooling_params, use_tqdm)
        if pooling_params is not None:
            raise InvalidRequestError("pooling_params are of models that read both texts at once", "pooling_params")
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

    def _score_pairs(
        self, texts: list[tuple[str, str]], params: PoolingParams | None, use_tqdm: bool
    ) -> list[ScoringRequestOutput]:
        session = self._alive()
        most = None if params is None else params.truncate_prompt_tokens
        model, config = session.model.facts, session.config
        prompts: list[Prompt] = [
            pair_prompt(session.tokenizer, model, config, one, other, most) for one, other in texts
        ]
        return [
            PooledRequestOutput(
                request_id=each.request_id,
                outputs=ScoringOutput(float(each.outputs.data[0])),
                prompt_token_ids=each.prompt_token_ids,
                num_cached_tokens=each.num_cached_tokens,
            )
            for each in self.encode(prompts, params, use_tqdm=use_tqdm, pooling_task="classify")
        ]

    def classify(
        self,
        prompts: Prompt | Sequence[Prompt],
        pooling_params: PoolingParams | None = None,
        *,
        use_tqdm: bool = True,
    ) -> list[ClassificationRequestOutput]:
        """Each prompt's classes by the model's head; raises as `encode`, also where it has none."""
        outputs = self.encode(prompts, pooling_params, use_tqdm=use_tqdm, pooling_task="classify")
        return [classification_output(each) for each in outputs]

    def reward(
        self,
        prompts: Prompt | Sequence[Prompt],
        pooling_params: PoolingParams | None = None,
        *,
        use_tqdm: bool = True,
    ) -> list[PoolingRequestOutput]:
        """What the model's head says as it is, of each prompt or, where it judges so, of each token; raises as
        `encode`."""
        head, params = self._alive().model.head, pooling_params or PoolingParams()
        task: PoolingTask = "token_classify" if head is not None and head.form.pooled == "all" else "classify"
        return self.encode(prompts, replace(params, use_activation=False), use_tqdm=use_tqdm, pooling_task=task)
