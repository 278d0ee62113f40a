"""Prompts made into vectors equal transformers' last hidden states, pooled: chunked, preempted, reused, mixed with
generation, from models that have a head and bare ones."""

from __future__ import annotations

import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from oracle import GreedyOracle
from tiny_embedder import save_bare_embedder, sentence_transformer
from tiny_families import save_tiny

from engine import LLM, SamplingParams
from engine.errors import ConfigError, InvalidRequestError
from engine.pooling import PoolingParams

SETTINGS: dict[str, Any] = {
    "device": "cpu",
    "dtype": "float32",
    "compile": "none",
    "max_model_len": 512,
    "max_num_batched_tokens": 64,
}
_RANDOM = random.Random(5)
PROMPTS = [[_RANDOM.randrange(5, 512) for _ in range(n)] for n in (1, 2, 15, 16, 17, 64, 65, 200, 333)]


@pytest.fixture(scope="module", params=["Qwen3", "Gemma2"])
def tiny(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, torch.nn.Module]:
    path = tmp_path_factory.mktemp("embeds")
    return path, save_tiny(request.param, path)


def states_of(model: torch.nn.Module, ids: list[int]) -> np.ndarray:
    base: Any = getattr(model, "model", model)
    with torch.inference_mode():
        return base(torch.tensor([ids])).last_hidden_state[0].numpy()  # type: ignore[no-any-return]


def unit(vector: np.ndarray) -> np.ndarray:
    return vector / np.linalg.norm(vector, axis=-1, keepdims=True)  # type: ignore[no-any-return]


def token_prompts(prompts: list[list[int]]) -> list[Any]:
    return [{"prompt_token_ids": ids} for ids in prompts]


POOLED: dict[str, tuple[PoolingParams, Callable[[np.ndarray], np.ndarray]]] = {
    "last": (PoolingParams(), lambda states: unit(states[-1])),
    "mean": (PoolingParams(pooling_type="MEAN", normalize=False), lambda states: states.mean(axis=0)),
    "all": (PoolingParams(task="token_embed"), lambda states: states),
    "cut": (PoolingParams(dimensions=16), lambda states: unit(states[-1, :16])),
}


@pytest.mark.parametrize("kind", POOLED)
def test_vectors_equal_transformers(tiny: tuple[Path, torch.nn.Module], kind: str) -> None:
    path, model = tiny
    params, of = POOLED[kind]
    with LLM(str(path), kv_cache_memory=64 << 20, **SETTINGS) as llm:
        for again in (False, True):
            outputs = llm.encode(token_prompts(PROMPTS), params, use_tqdm=False)
            for ids, output in zip(PROMPTS, outputs, strict=True):
                np.testing.assert_allclose(output.outputs.data, of(states_of(model, ids)), atol=2e-4, rtol=2e-3)
                # Of every token something is wanted, so nothing may come from the cache; of the last one alone it may.
                reused = kind in ("last", "cut") and again and len(ids) > 16
                assert (output.num_cached_tokens > 0) == reused
        assert llm.stats().kv_blocks_used == 0
        assert llm.stats().generated_tokens == 0


@pytest.mark.parametrize("swap_space", [0, 64 << 20])
def test_beside_generation_and_preempted(tmp_path: Path, swap_space: int) -> None:
    """Generations push prompts that are half-way out of a small pool: the vectors stay the same, and so do tokens."""
    model = save_tiny("Qwen3", tmp_path)
    rng = random.Random(3)
    long = [[rng.randrange(5, 512) for _ in range(n)] for n in (150, 170, 190, 200, 220, 240)]
    expected = GreedyOracle(model, long, 60)
    tokens = SamplingParams(temperature=0.0, max_tokens=60, ignore_eos=True)
    with LLM(str(tmp_path), kv_cache_memory=3 << 18, swap_space=swap_space, **SETTINGS) as llm:
        session = llm._alive()
        pooled = [
            session.admission.admit(f"p{i}", None, ids, SamplingParams(max_tokens=1), pooling=kind)
            for i, (ids, kind) in enumerate((ids, kind) for ids in long for kind in ("mean", "last"))
        ]
        generated = [session.admission.admit(f"g{i}", None, ids, tokens) for i, ids in enumerate(long)]
        mixed = [each for i, one in enumerate(generated) for each in (one, *pooled[2 * i : 2 * i + 2])]
        outputs = {output.request_id: output for output in llm._run(mixed, 0.0, False)}
        ours = [outputs[f"g{i}"].outputs[0].token_ids for i in range(len(long))]
        assert ours == expected.tokens(guesses=ours)
        for i, ids in enumerate(long):
            states = states_of(model, ids)
            mean, last = outputs[f"p{2 * i}"].pooled, outputs[f"p{2 * i + 1}"].pooled
            np.testing.assert_allclose(mean, states.mean(axis=0, keepdims=True), atol=2e-4, rtol=2e-3)
            np.testing.assert_allclose(last, states[-1:], atol=2e-4, rtol=2e-3)
        assert llm.stats().preemptions > 0


def test_a_bare_model_of_an_embedder(tmp_path: Path) -> None:
    """As Qwen3-Embedding and e5-mistral are stored: the decoder alone, without head and prefix of names."""
    model = save_bare_embedder(tmp_path)
    sentence_transformer(tmp_path, "pooling_mode_mean_tokens", normalize=False, prompts={"query": "Find: "})
    with LLM(str(tmp_path), kv_cache_memory=64 << 20, **SETTINGS) as llm:
        [output] = llm.embed(token_prompts([PROMPTS[-1]]), use_tqdm=False)
        np.testing.assert_allclose(
            output.outputs.embedding, states_of(model, PROMPTS[-1]).mean(axis=0), atol=2e-4, rtol=2e-3
        )
        with pytest.raises(InvalidRequestError, match="embedding model"):
            llm.generate("a", use_tqdm=False)
        ids = llm._alive().tokenizer.encode
        one, other = (unit(states_of(model, ids(text)).mean(axis=0)) for text in ("Find: cats", "dogs"))
        [score] = llm.score("cats", "dogs", use_tqdm=False)
        assert score.outputs.score == pytest.approx(float(one @ other), abs=1e-4)
        assert score.prompt_token_ids == ids("Find: cats") + ids("dogs")


def test_a_text_has_before_it_what_the_models_files_say_by_default(tmp_path: Path) -> None:
    model = save_bare_embedder(tmp_path)
    sentence_transformer(tmp_path, "pooling_mode_mean_tokens", normalize=False)
    (tmp_path / "config_sentence_transformers.json").write_text(
        '{"prompts": {"query": "Find: ", "other": "x"}, "default_prompt_name": "query"}'
    )
    with LLM(str(tmp_path), kv_cache_memory=64 << 20, **SETTINGS) as llm:
        ids = llm._alive().tokenizer.encode("Find: cats")
        given = [{"prompt": "cats"}, {"prompt_token_ids": ids}]
        texts = [*llm.embed("cats", use_tqdm=False), *llm.embed(given, use_tqdm=False)]  # type: ignore[arg-type]
        assert [each.prompt_token_ids for each in texts] == [ids, ids, ids]
        [bare] = llm.encode("cats", use_tqdm=False)
        assert bare.prompt_token_ids == llm._alive().tokenizer.encode("cats")
    np.testing.assert_allclose(texts[0].outputs.embedding, states_of(model, ids).mean(axis=0), atol=2e-4, rtol=2e-3)


def test_texts_are_lower_case_where_the_models_files_say_so(tmp_path: Path) -> None:
    save_bare_embedder(tmp_path)
    sentence_transformer(tmp_path, "pooling_mode_mean_tokens", normalize=False)
    found = []
    for lowers in (False, True):
        (tmp_path / "sentence_bert_config.json").write_text(f'{{"do_lower_case": {str(lowers).lower()}}}')
        with LLM(str(tmp_path), kv_cache_memory=64 << 20, **SETTINGS) as llm:
            found.append([each.prompt_token_ids for each in llm.embed(["CaTs", "cats"], use_tqdm=False)])
    assert found[0][0] != found[0][1] and found[1] == [found[0][1]] * 2


def test_a_decoder_whose_config_says_that_it_looks_both_ways(tmp_path: Path) -> None:
    """As gte-Qwen2: without `is_causal` its vectors would be plausible and wrong."""
    model = save_tiny("Qwen2", tmp_path)
    model.config.is_causal = False
    model.config.save_pretrained(tmp_path)
    with LLM(str(tmp_path), **{**SETTINGS, "max_num_batched_tokens": 512}) as llm:
        outputs = llm.embed(token_prompts(PROMPTS), use_tqdm=False)
    for ids, output in zip(PROMPTS, outputs):
        np.testing.assert_allclose(output.outputs.embedding, unit(states_of(model, ids)[-1]), atol=2e-4, rtol=2e-3)


def test_scores_are_of_one_with_many_or_of_pairs(tiny: tuple[Path, torch.nn.Module]) -> None:
    with LLM(str(tiny[0]), kv_cache_memory=64 << 20, **SETTINGS) as llm:
        many = llm.score("abc", ["abc", "x", "abcd"], use_tqdm=False)
        pairs = llm.score(["abc", "abc"], ["x", "abc"], use_tqdm=False)
        assert [s.outputs.score for s in pairs] == pytest.approx([many[1].outputs.score, 1.0], abs=1e-5)
        assert len(many) == 3
        with pytest.raises(InvalidRequestError, match="2 texts"):
            llm.score(["a", "b"], ["a", "b", "c"], use_tqdm=False)


def test_what_cannot_be_pooled_is_refused(tiny: tuple[Path, torch.nn.Module]) -> None:
    with LLM(str(tiny[0]), kv_cache_memory=64 << 20, **SETTINGS) as llm:
        with pytest.raises(InvalidRequestError, match="dimensions is 65"):
            llm.embed("a", PoolingParams(dimensions=65), use_tqdm=False)
        with pytest.raises(InvalidRequestError, match="tokens"):
            llm.embed(token_prompts([[7] * 513]), use_tqdm=False)
        with pytest.raises(InvalidRequestError, match="prompt 1: the prompt is empty"):
            llm.embed(["a", ""], use_tqdm=False)
        [cut] = llm.embed(token_prompts([[7] * 900]), PoolingParams(truncate_prompt_tokens=-1), use_tqdm=False)
        assert cut.prompt_token_ids == [7] * 512
        with pytest.raises(InvalidRequestError, match="classifier"):
            llm.classify("a")
    for wrong in ({"pooling_type": "first"}, {"dimensions": 0}, {"task": "x"}):
        with pytest.raises(InvalidRequestError):
            PoolingParams(**wrong)


@pytest.mark.parametrize("mode", ["pooling_mode_weightedmean_tokens"])
def test_other_poolings_are_named(tmp_path: Path, mode: str) -> None:
    save_tiny("Llama", tmp_path)
    sentence_transformer(tmp_path, mode, normalize=True)
    with (
        LLM(str(tmp_path), kv_cache_memory=64 << 20, **SETTINGS) as llm,
        pytest.raises(InvalidRequestError, match="is not one of"),
    ):
        llm.embed("a", use_tqdm=False)
    (tmp_path / "modules.json").write_text("{")
    with pytest.raises(ConfigError, match=r"modules\.json"):
        LLM(str(tmp_path), kv_cache_memory=64 << 20, **SETTINGS)
