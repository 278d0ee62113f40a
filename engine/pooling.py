"""Prompts made into vectors instead of continued: what is asked for, and what comes. Names and shapes follow vLLM's,
with NumPy arrays in place of tensors.

Any model can be pooled: the hidden states behind its final norm, of the last token, the first or the mean of all. An
embedding model's own files say which of them it was trained for (`engine.models.pooling`). What a model with a head
that judges texts says of them comes in the same way (`engine.models.heads`).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Generic, Literal, TypeVar, get_args

import msgspec
import numpy as np

from engine.dense import DenseLayer
from engine.errors import InvalidRequestError, RequestFailedError
from engine.models.heads import HeadSpec, LabelFunction
from engine.models.pooling import PoolingDefaults
from engine.request import RequestOutput
from engine.step import Pooling

PoolingTask = Literal["embed", "token_embed", "classify", "token_classify"]
_KINDS = ("last", "mean", "all", "cls", "max")
Data = TypeVar("Data")


class PoolingParams(msgspec.Struct, frozen=True, kw_only=True):
    """``pooling_type``: "last", "mean", "cls", "max" or "all", in any case; None: the model's own, or "all" for the
    task "token_embed". ``normalize``: to length 1; None: as the model's files say (tokens of "all" are not).
    ``dimensions``: the first ones, for models trained so (Matryoshka), cut before normalising.
    ``truncate_prompt_tokens``: longer
    prompts lose their end, but for what the tokenizer puts behind each; -1: to what fits. ``task``: left out,
    "token_embed" for "all", else what the model is for: "embed", or "classify" or "token_classify" with its head.
    ``use_activation``: of those two, False for the head's outputs as they are; None: what it was trained with.
    Raises `InvalidRequestError`."""

    pooling_type: str | None = None
    normalize: bool | None = None
    dimensions: int | None = None
    truncate_prompt_tokens: int | None = None
    task: PoolingTask | None = None
    use_activation: bool | None = None

    def __post_init__(self) -> None:
        if self.pooling_type is not None and self.pooling_type.lower() not in _KINDS:
            raise InvalidRequestError(
                f"pooling_type must be one of {', '.join(_KINDS)}, got {self.pooling_type[:20]!r}", "pooling_type"
            )
        tasks = get_args(PoolingTask)
        if self.task not in (None, *tasks):
            raise InvalidRequestError(f"task must be one of {', '.join(tasks)}, got {str(self.task)[:20]!r}", "task")
        for name, low in (("dimensions", 1), ("truncate_prompt_tokens", -1)):
            value = getattr(self, name)
            if value is not None and (not isinstance(value, int) or value < low or value == 0):
                raise InvalidRequestError(f"{name} must be at least {low}{' and not 0' * (low < 0)}, got {value}", name)
        if self.task in ("classify", "token_classify"):
            for name in ("pooling_type", "normalize", "dimensions"):
                if getattr(self, name) is not None:
                    raise InvalidRequestError(f"{name} is of embeddings, not of the task {self.task}", name)
            return
        if self.use_activation is not None and self.task is not None:
            raise InvalidRequestError(f"use_activation is of classes, not of the task {self.task}", "use_activation")
        all_tokens = (self.pooling_type or "").lower() == "all"
        if self.task and self.pooling_type and (self.task == "token_embed") != all_tokens:
            raise InvalidRequestError("pooling_type all and task token_embed go together", "pooling_type")


class ResolvedPooling(msgspec.Struct, frozen=True, kw_only=True):
    """With the model's own in place of what was left out."""

    kind: Pooling
    normalize: bool
    dimensions: int | None
    dense: tuple[DenseLayer, ...] = ()
    function: LabelFunction = "identity"
    """of what the model's head says"""

    def of(self, output: RequestOutput) -> np.ndarray:
        """float32 [size], of "all" [tokens, size]. Raises `RequestFailedError` for what ended before."""
        reason = output.outputs[0].finish_reason
        if output.pooled is None or reason != "stop":
            raise RequestFailedError(output.outputs[0].stop_reason or f"it was not pooled: it ended with {reason}")
        vectors: np.ndarray = output.pooled
        for layer in self.dense:
            vectors = layer.of(vectors)
        vectors = activated(vectors[:, : self.dimensions], self.function)
        if self.normalize:
            vectors = vectors / np.maximum(np.linalg.norm(vectors, axis=1, keepdims=True), 1e-12)
        return vectors if self.kind in ("all", "judge_all") else vectors[0]


def activated(outputs: np.ndarray, function: LabelFunction) -> np.ndarray:
    """A head's [rows, labels], as callers see them: float32 as these."""
    if function == "identity":
        return outputs
    if function == "sigmoid":
        shares: np.ndarray = 1 / (1 + np.exp(-outputs))
    else:
        powers = np.exp(outputs - outputs.max(axis=1, keepdims=True))
        shares = powers / powers.sum(axis=1, keepdims=True)
    return shares


def resolve_pooling(
    params: PoolingParams | None,
    model: PoolingDefaults,
    size: int,
    head: HeadSpec | None = None,
    dense: tuple[DenseLayer, ...] = (),
) -> ResolvedPooling:
    """`size`: of the model's states; `dense`: what stands behind their pooling. Raises `InvalidRequestError`."""
    given = params or PoolingParams()
    asks_embedding = given.task is not None or given.pooling_type is not None or given.dimensions is not None
    if given.task in ("classify", "token_classify") or (head is not None and not asks_embedding):
        return _judged(given, head)
    if given.use_activation is not None:
        raise InvalidRequestError("use_activation is of classes, and these are embeddings", "use_activation")
    if model.unsupported:
        raise InvalidRequestError(f"embeddings of this model are not supported: {model.unsupported}", "model")
    kind = given.pooling_type.lower() if given.pooling_type else None
    default: Pooling = "all" if given.task == "token_embed" else model.pooling_type
    layers = dense if (kind or default) != "all" else ()
    size = len(layers[-1].weight) if layers else size
    if given.dimensions is not None and given.dimensions > size:
        raise InvalidRequestError(
            f"dimensions is {given.dimensions}; this model's embeddings have {size}", "dimensions"
        )
    normalize = given.normalize
    if normalize is None:
        normalize = model.normalize and (kind or default) != "all"
    return ResolvedPooling(kind=kind or default, normalize=normalize, dimensions=given.dimensions, dense=layers)  # type: ignore[arg-type]


def _judged(given: PoolingParams, head: HeadSpec | None) -> ResolvedPooling:
    if head is None:
        raise InvalidRequestError("this model has no classifier: use a checkpoint that has one", "model")
    each = head.form.pooled == "all"
    if given.task is not None and each != (given.task == "token_classify"):
        use = "use the task token_classify, at /pooling" if each else "use the task classify"
        raise InvalidRequestError(f"this model judges {'each token' if each else 'whole texts'}: {use}", "task")
    if given.normalize is not None:
        raise InvalidRequestError("normalize is of embeddings, and this model judges: use the task embed", "normalize")
    function = "identity" if given.use_activation is False else head.function
    return ResolvedPooling(kind="judge_all" if each else "judge", normalize=False, dimensions=None, function=function)


def truncated(token_ids: list[int], most: int | None, room: int, suffix: Sequence[int]) -> list[int]:
    """`most`: as `PoolingParams.truncate_prompt_tokens`; `room`: what fits; `suffix`: what the tokenizer puts behind a
    text, and stays."""
    limit = room if most == -1 else most
    if limit is None or len(token_ids) <= limit:
        return token_ids
    kept = list(suffix) if suffix and token_ids[-len(suffix) :] == list(suffix) and limit > len(suffix) else []
    return [*token_ids[: limit - len(kept)], *kept]


class PoolingOutput(msgspec.Struct, frozen=True):
    data: np.ndarray
    """float32 [size], or [tokens, size]"""


class EmbeddingOutput(msgspec.Struct, frozen=True):
    embedding: list[float]

    @property
    def hidden_size(self) -> int:
        return len(self.embedding)


class ClassificationOutput(msgspec.Struct, frozen=True):
    probs: list[float]

    @property
    def num_classes(self) -> int:
        return len(self.probs)


class ScoringOutput(msgspec.Struct, frozen=True):
    score: float


class PooledRequestOutput(msgspec.Struct, Generic[Data], frozen=True, kw_only=True):
    """`outputs`: one, as vLLM has it."""

    request_id: str
    outputs: Data
    prompt_token_ids: list[int]
    num_cached_tokens: int = 0
    finished: bool = True


PoolingRequestOutput = PooledRequestOutput[PoolingOutput]
EmbeddingRequestOutput = PooledRequestOutput[EmbeddingOutput]
ClassificationRequestOutput = PooledRequestOutput[ClassificationOutput]
ScoringRequestOutput = PooledRequestOutput[ScoringOutput]


def pooled_output(output: RequestOutput, pooling: ResolvedPooling) -> PoolingRequestOutput:
    """Raises as `ResolvedPooling.of`."""
    return PooledRequestOutput(
        request_id=output.request_id,
        outputs=PoolingOutput(pooling.of(output)),
        prompt_token_ids=output.prompt_token_ids,
        num_cached_tokens=output.num_cached_tokens,
    )


def embedding_output(pooled: PoolingRequestOutput) -> EmbeddingRequestOutput:
    return PooledRequestOutput(
        request_id=pooled.request_id,
        outputs=EmbeddingOutput(pooled.outputs.data.tolist()),
        prompt_token_ids=pooled.prompt_token_ids,
        num_cached_tokens=pooled.num_cached_tokens,
    )


def classification_output(pooled: PoolingRequestOutput) -> ClassificationRequestOutput:
    return PooledRequestOutput(
        request_id=pooled.request_id,
        outputs=ClassificationOutput(pooled.outputs.data.tolist()),
        prompt_token_ids=pooled.prompt_token_ids,
        num_cached_tokens=pooled.num_cached_tokens,
    )


def scores_pairs(head: HeadSpec | None) -> bool:
    """Whether the model reads both texts of a comparison at once: a cross-encoder; else their embeddings are compared.
    Raises `InvalidRequestError` where it can do neither."""
    if head is not None and (len(head.labels) != 1 or head.form.pooled == "all"):
        raise InvalidRequestError(f"a model that scores pairs has one label; this one has {len(head.labels)}", "model")
    return head is not None


def similarity(one: np.ndarray, other: np.ndarray) -> float:
    """The cosine of the angle between two embeddings, in [-1, 1]."""
    one, other = one.astype(np.float64), other.astype(np.float64)
    cosine = float(np.dot(one, other)) / max(float(np.linalg.norm(one) * np.linalg.norm(other)), 1e-12)
    return min(max(cosine, -1.0), 1.0)


def pairs_of(one: Sequence[str], other: Sequence[str]) -> list[tuple[int, int]]:
    """Which of the texts are compared: one with each, or each with its own. Raises `InvalidRequestError`."""
    if not one or not other:
        raise InvalidRequestError("there must be a text on both sides", "text_1" if not one else "text_2")
    if len(one) == 1:
        return [(0, index) for index in range(len(other))]
    if len(one) != len(other):
        raise InvalidRequestError(
            f"{len(one)} texts are compared with one each, or with as many; got {len(other)}", "text_2"
        )
    return [(index, index) for index in range(len(one))]
