"""What stands on a model that classifies, scores or rewards texts, in the place of an unembedding. Torch-free."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Literal

import msgspec

from engine.errors import ConfigError, UnsupportedModelError
from engine.models.bounds import CONFIG_RANGES, TOKENIZER_BYTES
from engine.models.families.rows import Rows
from engine.models.json_file import read_json_object, shown

Purpose = Literal["generates", "embeds", "classifies", "rewards"]
"""what a checkpoint is for, as its architecture says"""
LabelFunction = Literal["softmax", "sigmoid", "identity"]


class HeadForm(msgspec.Struct, frozen=True, kw_only=True):
    """A family's: which states it is given, the layers, and what checkpoints call them."""

    pooled: Literal["last", "cls", "mean", "all"] = "last"
    """cls: the first; all: each token is judged by itself"""
    out: str = "score"
    out_bias: bool = False
    dense: str | None = None
    """a layer of the hidden size before it, and what follows that"""
    dense_bias: bool = True
    activation: Literal["tanh", "relu", "gelu"] = "tanh"
    norm: str | None = None
    """a LayerNorm without bias behind the activation"""


HEADS: Mapping[str, HeadForm] = MappingProxyType(
    {"ForSequenceClassification": HeadForm(), "ForTokenClassification": HeadForm(pooled="all", out_bias=True)}
)
"""of decoders: one matrix, on the last token's state or each"""
REWARD = HeadForm(pooled="all", out="score.2", out_bias=True, dense="score.0", activation="relu")
"""`Qwen2ForRewardModel`"""


class HeadSpec(msgspec.Struct, frozen=True, kw_only=True):
    form: HeadForm
    labels: tuple[str, ...]
    function: LabelFunction
    """from its outputs to what callers see"""
    token_ids: tuple[int, ...] = ()
    """the labels are these tokens, whose rows of the unembedding stand in the place of a matrix of its own; with two
    tokens and one label, the second's row less the first's"""


def head_of(config: Mapping[str, object], form: HeadForm, purpose: Purpose) -> HeadSpec:
    """Raises ConfigError and UnsupportedModelError."""
    labels, tokens = _labels(config), _token_ids(config)
    if tokens and len(labels) not in (len(tokens), len(tokens) - 1):
        raise ConfigError(f"classifier_from_token names {len(tokens)} tokens, for {len(labels)} labels")
    pooling = config.get("classifier_pooling")
    if form.pooled == "cls" and pooling is not None:
        if pooling not in ("cls", "mean"):
            raise UnsupportedModelError(f"classifier_pooling {shown(pooling)} is not supported; cls and mean are")
        form = msgspec.structs.replace(form, pooled=pooling)
    return HeadSpec(form=form, labels=labels, function=_function(config, len(labels), purpose), token_ids=tokens)


def head_rows(spec: HeadSpec, hidden: int) -> dict[str, Rows]:
    """Checkpoint name → place, for its tensors."""
    form, rows = spec.form, dict[str, Rows]()
    for name, layer, size, bias in (
        (form.dense, "dense", hidden, form.dense_bias),
        (form.norm, "norm", hidden, False),
        (None if spec.token_ids else form.out, "out", len(spec.labels), form.out_bias),
    ):
        for part in () if name is None else ("weight", "bias") if bias else ("weight",):
            rows[f"{name}.{part}"] = Rows(f"head.{layer}.{part}", 0, size)
    return rows


def head_values(spec: HeadSpec, hidden: int) -> int:
    """Numbers in its tensors."""
    form, values = spec.form, len(spec.labels) * (hidden + spec.form.out_bias)
    return values + (form.dense is not None) * hidden * (hidden + form.dense_bias) + (form.norm is not None) * hidden


def _labels(config: Mapping[str, object]) -> tuple[str, ...]:
    """transformers' rule: `id2label`, or `num_labels`, or two."""
    names = config.get("id2label")
    if isinstance(names, Mapping) and names:
        given = {str(key): str(name) for key, name in names.items()}
        if set(given) != {str(index) for index in range(len(given))}:
            raise ConfigError(f"id2label must name labels 0, 1, …, found {shown(names)}")
        labels = tuple(given[str(index)] for index in range(len(given)))
    else:
        count = config.get("num_labels", 2)
        if not isinstance(count, int) or isinstance(count, bool) or count < 1:
            raise ConfigError(f"num_labels must be a positive integer, found {shown(count)}")
        labels = tuple(f"LABEL_{index}" for index in range(min(count, 2**20)))
    allowed = CONFIG_RANGES["num_labels"]
    if not allowed.holds(len(labels)):
        raise ConfigError(f"num_labels must be in {allowed}, found {len(labels)}")
    return labels


def _function(config: Mapping[str, object], count: int, purpose: Purpose) -> LabelFunction:
    """What the model was trained with; sentence-transformers' word counts, for scores are what it calls so."""
    own = config.get("sentence_transformers")
    named = own.get("activation_fn") if isinstance(own, Mapping) else None
    named = named or config.get("sbert_ce_default_activation_function")
    if named is not None:
        kind = str(named).rpartition(".")[2].lower()
        if kind not in ("identity", "sigmoid", "softmax"):
            raise UnsupportedModelError(
                f"activation_fn {shown(named)} is not supported; Identity, Sigmoid, Softmax are"
            )
        return kind  # type: ignore[return-value]  # one of the three
    problem = config.get("problem_type")
    if purpose == "rewards" or problem == "regression":
        return "identity"
    if problem == "multi_label_classification":
        return "sigmoid"
    return "softmax" if problem == "single_label_classification" or count > 1 else "sigmoid"


def with_token_ids(config: Mapping[str, object], directory: Path) -> Mapping[str, object]:
    """With ids in the place of the texts that `classifier_from_token` may name, as Qwen3-Reranker's do. Raises
    ConfigError."""
    found = config.get("classifier_from_token")
    if not isinstance(found, list) or not any(isinstance(token, str) for token in found):
        return config
    file = directory / "tokenizer.json"
    model = read_json_object(file, TOKENIZER_BYTES).get("model")
    vocabulary = model.get("vocab") if isinstance(model, Mapping) else None
    if not isinstance(vocabulary, Mapping) or not all(token in vocabulary for token in found):
        raise ConfigError(f"classifier_from_token: {shown(found)} are not all tokens of {file}")
    return {**config, "classifier_from_token": [vocabulary[token] for token in found]}


def _token_ids(config: Mapping[str, object]) -> tuple[int, ...]:
    found = config.get("classifier_from_token")
    if found is None:
        return ()
    if not isinstance(found, list) or not found or not all(isinstance(token, int) and token >= 0 for token in found):
        raise ConfigError(f"classifier_from_token must be a list of token ids, found {shown(found)}")
    return tuple(found)
