"""What models with a head that judges texts say equals transformers' logits and what is made of them."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from tiny_families import _SHAPE, TINY_FAMILIES, save_tiny, save_tokenizer

from engine import LLM
from engine.errors import ConfigError, InvalidRequestError
from engine.pooling import PoolingParams

SETTINGS: dict[str, Any] = {
    "device": "cpu",
    "dtype": "float32",
    "compile": "none",
    "max_model_len": 512,
    "max_num_batched_tokens": 64,
    "kv_cache_memory": 64 << 20,
}
_RANDOM = random.Random(5)
PROMPTS = [[_RANDOM.randrange(5, 512) for _ in range(n)] for n in (1, 2, 17, 64, 65, 200)]


def save_judge(family: str, path: Path, kind: str = "SequenceClassification", **changes: Any) -> Any:
    """transformers' module, float32, saved with a byte-level tokenizer."""
    shape = {**_SHAPE, **TINY_FAMILIES[family], "pad_token_id": 0, **changes}
    torch.manual_seed(3)
    model = getattr(transformers, f"{family}For{kind}")(getattr(transformers, f"{family}Config")(**shape))
    model.float().eval().save_pretrained(path)
    save_tokenizer(path)
    return model


def logits_of(model: Any, ids: list[int]) -> np.ndarray:
    with torch.inference_mode():
        return model(torch.tensor([ids])).logits[0].numpy()  # type: ignore[no-any-return]


def given(prompts: list[list[int]]) -> list[Any]:
    return [{"prompt_token_ids": ids} for ids in prompts]


def softmax(x: np.ndarray) -> np.ndarray:
    return np.exp(x) / np.exp(x).sum(axis=-1, keepdims=True)  # type: ignore[no-any-return]


@pytest.mark.parametrize("family", ["Qwen3", "Llama", "Gemma2"])
def test_classes_equal_transformers(tmp_path: Path, family: str) -> None:
    model = save_judge(family, tmp_path, num_labels=3)
    with LLM(str(tmp_path), **SETTINGS) as llm:
        for _ in range(2):  # the second time from the prefix cache
            outputs = llm.classify(given(PROMPTS), use_tqdm=False)
            raw = llm.classify(given(PROMPTS), PoolingParams(use_activation=False), use_tqdm=False)
            for ids, output, logits in zip(PROMPTS, outputs, raw, strict=True):
                expected = logits_of(model, ids)
                np.testing.assert_allclose(logits.outputs.probs, expected, atol=1e-4, rtol=1e-4)
                np.testing.assert_allclose(output.outputs.probs, softmax(expected), atol=1e-4)
        assert outputs[-1].num_cached_tokens > 0 and outputs[0].outputs.num_classes == 3
        with pytest.raises(InvalidRequestError, match="generates nothing"):
            llm.generate("a", use_tqdm=False)
        with pytest.raises(InvalidRequestError, match="one label"):
            llm.score("a", "b", use_tqdm=False)
        [embedded] = llm.embed(given(PROMPTS[-1:]), use_tqdm=False)
        assert embedded.outputs.hidden_size == 64


@pytest.mark.parametrize(
    ("said", "function"),
    [
        ({}, lambda x: 1 / (1 + np.exp(-x))),
        ({"problem_type": "regression"}, lambda x: x),
        ({"sentence_transformers": {"activation_fn": "torch.nn.modules.linear.Identity"}}, lambda x: x),
    ],
)
def test_one_label_scores_pairs(tmp_path: Path, said: dict[str, Any], function: Any) -> None:
    model = save_judge("Qwen2", tmp_path, num_labels=1)
    file = tmp_path / "config.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), **said}))
    with LLM(str(tmp_path), **SETTINGS) as llm:
        scores = llm.score("abc", ["x", "a longer text"], use_tqdm=False)
        for text, score in zip(("x", "a longer text"), scores, strict=True):
            ids = llm._alive().tokenizer.encode("abc" + text)
            assert score.prompt_token_ids == ids
            assert score.outputs.score == pytest.approx(float(function(logits_of(model, ids))[0]), abs=1e-4)
        [reward] = llm.reward(given(PROMPTS[-1:]), use_tqdm=False)
        np.testing.assert_allclose(reward.outputs.data, logits_of(model, PROMPTS[-1]), atol=1e-4, rtol=1e-4)


def test_each_token_is_judged(tmp_path: Path) -> None:
    model = save_judge("Qwen2", tmp_path, "TokenClassification", num_labels=5)
    with LLM(str(tmp_path), **SETTINGS) as llm:
        outputs = llm.encode(given(PROMPTS), use_tqdm=False, pooling_task="token_classify")
        for ids, output in zip(PROMPTS, outputs, strict=True):
            np.testing.assert_allclose(output.outputs.data, softmax(logits_of(model, ids)), atol=1e-4)
        with pytest.raises(InvalidRequestError, match="each token"):
            llm.classify("a", use_tqdm=False)


def test_a_reward_model_has_two_layers_on_every_token(tmp_path: Path) -> None:
    """`Qwen2ForRewardModel`, which transformers does not have."""
    base = save_judge("Qwen2", tmp_path, num_labels=1)
    torch.manual_seed(5)
    layers = torch.nn.Sequential(torch.nn.Linear(64, 64), torch.nn.ReLU(), torch.nn.Linear(64, 1))
    weights = {f"model.{name}": each for name, each in base.model.state_dict().items()}
    weights |= {f"score.{name}": each for name, each in layers.state_dict().items()}
    from safetensors.torch import save_file

    save_file(weights, tmp_path / "model.safetensors")
    file = tmp_path / "config.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), "architectures": ["Qwen2ForRewardModel"]}))
    with LLM(str(tmp_path), **SETTINGS) as llm, torch.inference_mode():
        for ids, output in zip(PROMPTS, llm.reward(given(PROMPTS), use_tqdm=False), strict=True):
            expected = layers(base.model(torch.tensor([ids])).last_hidden_state[0]).numpy()
            np.testing.assert_allclose(output.outputs.data, expected, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("tied", [True, False])
def test_a_reranker_by_two_tokens(tmp_path: Path, tied: bool) -> None:
    """As Qwen3-Reranker is stored: a model that generates "yes" or "no"."""
    model = save_tiny("Qwen3", tmp_path, tie_word_embeddings=tied)
    file = tmp_path / "config.json"
    said = {"architectures": ["Qwen3ForSequenceClassification"], "num_labels": 1, "classifier_from_token": ["n", "y"]}
    file.write_text(json.dumps({**json.loads(file.read_text()), **said}))
    with LLM(str(tmp_path), **SETTINGS) as llm:
        no, yes = (llm._alive().tokenizer.encode(text)[0] for text in "ny")
        for ids, output in zip(PROMPTS, llm.classify(given(PROMPTS), use_tqdm=False), strict=True):
            both = logits_of(model, ids)[-1, [no, yes]]
            np.testing.assert_allclose(output.outputs.probs, softmax(both)[1:], atol=1e-4)
    file.write_text(json.dumps({**json.loads(file.read_text()), "classifier_from_token": ["no such token", "y"]}))
    with pytest.raises(ConfigError, match="classifier_from_token"):
        LLM(str(tmp_path), **SETTINGS)
