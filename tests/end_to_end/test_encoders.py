"""Encoders: vectors and scores equal transformers' hidden states and logits, put together as sentence-transformers
does; long and short prompts in one batch, whatever the budget of a step."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from tiny_embedder import sentence_transformer
from tiny_encoders import ENCODERS, save_encoder

from engine import LLM
from engine.errors import ConfigError, InvalidRequestError
from engine.pooling import PoolingParams

SETTINGS: dict[str, Any] = {
    "device": "cpu",
    "dtype": "float32",
    "compile": "none",
    "max_model_len": 400,
    "max_num_batched_tokens": 400,
}
_RANDOM = random.Random(5)
PROMPTS = [[_RANDOM.randrange(5, 300) for _ in range(n)] for n in (1, 17, 17, 64, 65, 333, 400)]
POOLED = {
    "cls": lambda states: states[0],
    "mean": lambda states: states.mean(axis=0),
    "max": lambda states: states.max(axis=0),
    "last": lambda states: states[-1],
}


def given(prompts: list[list[int]]) -> list[Any]:
    return [{"prompt_token_ids": ids} for ids in prompts]


def states_of(model: Any, ids: list[int]) -> np.ndarray:
    with torch.inference_mode():
        return model(torch.tensor([ids])).last_hidden_state[0].numpy()  # type: ignore[no-any-return]


@pytest.mark.parametrize("family", [*ENCODERS, "Gemma3Text"])
def test_vectors_equal_transformers(tmp_path: Path, family: str) -> None:
    model = save_encoder(family, tmp_path)
    expected = [states_of(model, ids) for ids in PROMPTS]
    with LLM(str(tmp_path), **SETTINGS) as llm:
        for kind, of in POOLED.items():
            params = PoolingParams(pooling_type=kind, normalize=False)
            outputs = llm.encode(given([*PROMPTS, *PROMPTS[::-1]]), params, use_tqdm=False)
            for states, output in zip([*expected, *expected[::-1]], outputs, strict=True):
                np.testing.assert_allclose(output.outputs.data, of(states), atol=1e-4, rtol=1e-4)
                assert output.num_cached_tokens == 0
        [own] = llm.embed(given(PROMPTS[-1:]), use_tqdm=False)
        state = expected[-1][-1 if family == "Gemma3Text" else 0]
        np.testing.assert_allclose(own.outputs.embedding, state / np.linalg.norm(state), atol=1e-4, rtol=1e-4)
        [tokens] = llm.encode(given(PROMPTS[-1:]), use_tqdm=False, pooling_task="token_embed")
        np.testing.assert_allclose(tokens.outputs.data, expected[-1], atol=1e-4, rtol=1e-4)
        assert llm.stats().kv_blocks_used == 0
        with pytest.raises(InvalidRequestError, match="generates nothing"):
            llm.generate("a", use_tqdm=False)


def test_old_names_of_norms_and_a_length_that_sentence_transformers_knows(tmp_path: Path) -> None:
    model = save_encoder("Bert", tmp_path)
    sentence_transformer(tmp_path, "pooling_mode_mean_tokens", normalize=False)
    (tmp_path / "sentence_bert_config.json").write_text('{"max_seq_length": 64}')
    file = tmp_path / "model.safetensors"
    old = {"LayerNorm.weight": "LayerNorm.gamma", "LayerNorm.bias": "LayerNorm.beta"}
    tensors = load_file(file)
    for name in list(tensors):
        for ending, formerly in old.items():
            if name.endswith(ending):
                tensors[f"bert.{name.removesuffix(ending)}{formerly}"] = tensors.pop(name)
                break
        else:
            tensors[f"bert.{name}"] = tensors.pop(name)
    tensors["cls.predictions.transform.LayerNorm.gamma"] = torch.ones(64)
    assert sum("gamma" in name for name in tensors) > 3
    save_file(tensors, file)
    with LLM(str(tmp_path), **{**SETTINGS, "max_model_len": None}) as llm:
        [output] = llm.embed(given(PROMPTS[3:4]), use_tqdm=False)
        np.testing.assert_allclose(output.outputs.embedding, states_of(model, PROMPTS[3]).mean(axis=0), atol=1e-4)
        with pytest.raises(InvalidRequestError, match="64"):
            llm.embed(given(PROMPTS[4:5]), use_tqdm=False)


@pytest.mark.parametrize("family", [pytest.param("Bert", marks=pytest.mark.exhaustive), "ModernBert"])
def test_compiled_bfloat16_is_close(tmp_path: Path, family: str) -> None:
    model = save_encoder(family, tmp_path)
    with LLM(str(tmp_path), **{**SETTINGS, "compile": "pieces", "dtype": "bfloat16"}) as llm:
        llm.wait_compiled()
        outputs = llm.encode(given(PROMPTS), PoolingParams(pooling_type="mean"), use_tqdm=False)
        for ids, output in zip(PROMPTS, outputs, strict=True):
            expected = states_of(model, ids).mean(axis=0)
            cosine = output.outputs.data @ expected / np.linalg.norm(expected)
            assert cosine > 0.999


@pytest.mark.parametrize(
    ("mode", "activation"), [("pooling_mode_cls_token", "Tanh"), ("pooling_mode_mean_tokens", "Identity")]
)
def test_sentence_transformers_modules(
    tmp_path: Path, mode: str, activation: str, caplog: pytest.LogCaptureFixture
) -> None:
    model = save_encoder("Bert", tmp_path)
    sentence_transformer(tmp_path, mode, normalize=True)
    torch.manual_seed(2)
    dense = torch.nn.Linear(64, 24)
    (tmp_path / "2_Dense").mkdir()
    named = f"torch.nn.modules.{'activation.Tanh' if activation == 'Tanh' else 'linear.Identity'}"
    (tmp_path / "2_Dense" / "config.json").write_text(json.dumps({"activation_function": named}))
    weights = {f"linear.{name}": each.detach() for name, each in dense.named_parameters()}
    save_file(weights, tmp_path / "2_Dense" / "model.safetensors")
    file = tmp_path / "modules.json"
    modules = json.loads(file.read_text())
    modules.insert(2, {"path": "2_Dense", "type": "sentence_transformers.models.Dense"})
    file.write_text(json.dumps(modules))
    with LLM(str(tmp_path), **SETTINGS) as llm, torch.inference_mode():
        for ids, output in zip(PROMPTS, llm.embed(given(PROMPTS), use_tqdm=False), strict=True):
            states = states_of(model, ids)
            pooled = dense(torch.from_numpy(states[0] if "cls" in mode else states.mean(axis=0)))
            expected = (pooled.tanh() if activation == "Tanh" else pooled).numpy()
            expected /= np.linalg.norm(expected)
            np.testing.assert_allclose(output.outputs.embedding, expected, atol=1e-4)
        with pytest.raises(InvalidRequestError, match="dimensions is 25"):
            llm.embed("a", PoolingParams(dimensions=25), use_tqdm=False)
    file.write_text(json.dumps([modules[0], modules[3], modules[1]]))
    with LLM(str(tmp_path), **SETTINGS) as llm, pytest.raises(InvalidRequestError, match="order"):
        assert any(record.levelname == "WARNING" and "another order" in record.message for record in caplog.records)
        llm.embed("a", use_tqdm=False)


@pytest.mark.parametrize("family", ENCODERS)
def test_a_cross_encoder_reads_both_texts(tmp_path: Path, family: str) -> None:
    """Its tokenizer says which token is of which text; BERT tells them apart, RoBERTa's kind does not here."""
    types = {"type_vocab_size": 2} if family == "Roberta" else {}
    model = save_encoder(family, tmp_path, "ForSequenceClassification", num_labels=1, **types)
    import transformers

    tokenizer = transformers.AutoTokenizer.from_pretrained(tmp_path)
    texts = [("cats purr", "a"), ("cats purr", "they do so when they are content " * 4), ("a", "b")]
    with LLM(str(tmp_path), **SETTINGS) as llm, torch.inference_mode():
        scores = llm.score([one for one, _ in texts], [other for _, other in texts], use_tqdm=False)
        for (one, other), score in zip(texts, scores, strict=True):
            inputs = tokenizer(one, other, return_tensors="pt")
            if family == "DistilBert":
                inputs.pop("token_type_ids", None)
            elif family == "XLMRoberta":
                inputs["token_type_ids"] = torch.zeros_like(inputs["input_ids"])
            expected = torch.sigmoid(model(**inputs).logits[0, 0]).item()
            assert score.outputs.score == pytest.approx(expected, abs=1e-4)
        [cut] = llm.score(
            "ab" * 150, "c" * 150, use_tqdm=False, pooling_params=PoolingParams(truncate_prompt_tokens=99)
        )
        inputs = tokenizer("ab" * 150, "c" * 150, truncation=True, max_length=99)
        assert cut.prompt_token_ids == inputs["input_ids"]
        for wrong in (300, 300 + PROMPTS[1][0]):  # as a token of a pair's second text is fed
            with pytest.raises(InvalidRequestError, match=r"outside the vocabulary \[0, 300\)"):
                llm.encode([5, wrong], use_tqdm=False)
        with pytest.raises(InvalidRequestError, match="tokens"):
            llm.score("ab" * 150, "c" * 150, use_tqdm=False)


@pytest.mark.parametrize(("family", "changes"), [("Bert", {}), ("ModernBert", {"classifier_pooling": "mean"})])
def test_classes_of_texts_and_tokens(tmp_path: Path, family: str, changes: dict[str, Any]) -> None:
    for kind, task in (("ForSequenceClassification", "classify"), ("ForTokenClassification", "token_classify")):
        model = save_encoder(family, tmp_path, kind, num_labels=4, **changes)
        with LLM(str(tmp_path), **SETTINGS) as llm, torch.inference_mode():
            outputs = llm.encode(given(PROMPTS), use_tqdm=False, pooling_task=task)  # type: ignore[arg-type]
            for ids, output in zip(PROMPTS, outputs, strict=True):
                expected = model(torch.tensor([ids])).logits[0].softmax(dim=-1).numpy()
                np.testing.assert_allclose(output.outputs.data, expected, atol=1e-4)


def test_a_config_of_modernbert_as_it_was_published(tmp_path: Path) -> None:
    """Bases and a period in the place of what transformers 5 writes for each type and each layer."""
    layers = ["full_attention", "sliding_attention", "full_attention", "sliding_attention"]
    bases = {"full_attention": 50000.0, "sliding_attention": 500.0}
    rope = {kind: {"rope_type": "default", "rope_theta": base} for kind, base in bases.items()}
    model = save_encoder("ModernBert", tmp_path, layer_types=layers, rope_parameters=rope)
    file = tmp_path / "config.json"
    config = json.loads(file.read_text())
    assert config.pop("layer_types") == layers
    assert config.pop("rope_parameters") == rope
    older = {"global_attn_every_n_layers": 2, "global_rope_theta": 50000.0, "local_rope_theta": 500.0}
    file.write_text(json.dumps(config | older))
    with LLM(str(tmp_path), **SETTINGS) as llm:
        params = PoolingParams(pooling_type="mean", normalize=False)
        for ids, output in zip(PROMPTS, llm.encode(given(PROMPTS), params, use_tqdm=False), strict=True):
            np.testing.assert_allclose(output.outputs.data, states_of(model, ids).mean(axis=0), atol=1e-4, rtol=1e-4)


def test_texts_of_any_length_are_cut(tmp_path: Path) -> None:
    """By both doors, to what transformers cuts them to; what is not to be cut is refused in words that say how it
    would be."""
    save_encoder("Bert", tmp_path)
    import transformers

    tokenizer = transformers.AutoTokenizer.from_pretrained(tmp_path)
    long = "word " * 100_000
    with LLM(str(tmp_path), **{**SETTINGS, "max_model_len": 128}) as llm:
        for most, text in ((32, long), (-1, long), (64, "word " * 300)):
            [output] = llm.embed(text, PoolingParams(truncate_prompt_tokens=most), use_tqdm=False)
            length = 128 if most == -1 else most
            assert output.prompt_token_ids == tokenizer(text, truncation=True, max_length=length)["input_ids"]
        for text in ("word " * 26, "word " * 300, long):
            with pytest.raises(InvalidRequestError, match=r"context length is 128 .*truncate_prompt_tokens") as caught:
                llm.embed(text, use_tqdm=False)
            assert "contexts_translated" not in str(caught.value)


def test_settings_that_mean_nothing_here_are_refused(tmp_path: Path) -> None:
    save_encoder("Bert", tmp_path)
    for wrong, told in (
        ({"max_num_batched_tokens": 256}, "max_model_len"),
        ({"kv_cache_memory": 1 << 20}, "kv_cache_memory"),
        ({"attention_backend": "cpu"}, "attention_backend"),
        ({"enable_prefix_caching": True}, "enable_prefix_caching"),
    ):
        with pytest.raises(ConfigError, match=told):
            LLM(str(tmp_path), **{**SETTINGS, **wrong})
