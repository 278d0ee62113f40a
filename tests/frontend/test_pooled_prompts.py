"""Vectors of a prompt from the chunks in which they come, and what a model's files say of them."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from engine.errors import InvalidRequestError
from engine.frontend.pooled_prompt import PooledPrompt
from engine.models.pooling import PoolingDefaults, pooling_of, pooling_of_gguf
from engine.pooling import PoolingParams, pairs_of, resolve_pooling, similarity, truncated
from engine.step import NO_VECTORS, Pooling, RowVectors, StepResult, decode_result, encode_step

SIZE = 3


@given(
    st.integers(1, 12).flatmap(lambda n: st.tuples(st.just(n), st.sets(st.integers(1, n)), st.sets(st.integers(1, n)))),
    st.sampled_from(["last", "mean", "all"]),
)
def test_chunks_come_together_and_a_new_start_forgets(case: tuple[int, set[int], set[int]], kind: Pooling) -> None:
    """A sequence is preempted half-way, and computes its prompt again in other chunks."""
    length, first, second = case
    states = np.random.default_rng(length).normal(size=(length, SIZE)).astype(np.float32)
    pooled = PooledPrompt(kind, length)
    assert pooled.vectors() is None
    for ends in (sorted(first - {length}), sorted(second | {length})):
        start = 0
        for end in ends:
            chunk = states[start:end]
            part = {"last": chunk[-1:], "mean": chunk.sum(axis=0), "all": chunk}[kind]
            if kind != "last" or end == length:
                pooled.add(part.tobytes(), start)
            start = end
    expected = {"last": states[-1:], "mean": states.mean(axis=0, keepdims=True), "all": states}[kind]
    found = pooled.vectors()
    assert found is not None and found.dtype == np.float32
    np.testing.assert_allclose(found, expected, rtol=1e-5, atol=1e-6)


@given(st.lists(st.floats(-1e3, 1e3, width=32), min_size=1, max_size=50), st.floats(-10, 10, width=32))
def test_a_cosine_is_never_beyond_1(values: list[float], scale: float) -> None:
    one = np.array(values, dtype=np.float32)
    assert -1 <= similarity(one, one * np.float32(scale)) <= 1
    if np.linalg.norm(one) > 1e-3:
        assert similarity(one, one) == pytest.approx(1, abs=1e-12)


def test_the_task_follows_the_pooling_type() -> None:
    for params in (PoolingParams(pooling_type="ALL"), PoolingParams(pooling_type="all", task="token_embed")):
        found = resolve_pooling(params, PoolingDefaults(normalize=True), 8)
        assert found.kind == "all" and not found.normalize
    for params in (PoolingParams(pooling_type="mean"), PoolingParams(pooling_type="mean", task="embed")):
        assert resolve_pooling(params, PoolingDefaults(normalize=True), 8).normalize
    for wrong in ({"pooling_type": "all", "task": "embed"}, {"pooling_type": "mean", "task": "token_embed"}):
        with pytest.raises(InvalidRequestError, match="together"):
            PoolingParams(**wrong)  # type: ignore[arg-type]


def test_vectors_travel_by_row() -> None:
    parts = [(4, np.arange(6, dtype=np.float32).reshape(2, 3)), (1, np.ones((1, 3), dtype=np.float32))]
    result = StepResult(step_id=3, token_ids=[0], pooled=RowVectors.of(parts))
    again = decode_result(encode_step(result))
    assert again == result
    for row, vectors in parts:
        np.testing.assert_array_equal(again.pooled.of_row(row), vectors)
    assert again.pooled.of_row(2).shape == (0, 3)
    assert RowVectors.of([]) == NO_VECTORS


@pytest.mark.parametrize(
    ("most", "kept"), [(None, 6), (6, 6), (9, 6), (4, 4), (-1, 5), (1, 1), (2, 2)], ids=lambda value: str(value)
)
def test_truncated_prompts_keep_what_the_tokenizer_put_behind(most: int | None, kept: int) -> None:
    ids = [5, 6, 7, 8, 9, 2]
    cut = truncated(ids, most, room=5, suffix=[2])
    assert len(cut) == kept
    assert cut == ids or cut == ([*ids[: kept - 1], 2] if kept > 1 else [5])
    assert truncated(ids, most, room=5, suffix=[]) == ids[:kept]


def test_what_files_say_of_pooling(tmp_path: Path) -> None:
    assert pooling_of(tmp_path) == PoolingDefaults()

    def modules(*kinds: str) -> None:
        paths = {"Pooling": "1_Pooling"}
        found = [{"path": paths.get(kind, ""), "type": f"sentence_transformers.models.{kind}"} for kind in kinds]
        (tmp_path / "modules.json").write_text(json.dumps(found))

    def pooling(**config: object) -> None:
        (tmp_path / "1_Pooling").mkdir(exist_ok=True)
        (tmp_path / "1_Pooling" / "config.json").write_text(json.dumps(config))

    modules("Transformer", "Pooling")
    pooling(pooling_mode_mean_tokens=True, pooling_mode_cls_token=False)
    assert pooling_of(tmp_path) == PoolingDefaults(pooling_type="mean", normalize=False, declared=True)
    modules("Transformer", "Pooling", "Normalize")
    pooling(pooling_mode="lasttoken")
    (tmp_path / "config_sentence_transformers.json").write_text('{"prompts": {"query": "q: ", "document": ""}}')
    assert pooling_of(tmp_path) == PoolingDefaults(prompts={"query": "q: "}, declared=True)
    for named, before in (("query", "q: "), ("document", ""), ("other", ""), (7, ""), (["query"], "")):
        told = {"prompts": {"query": "q: ", "document": ""}, "default_prompt_name": named}
        (tmp_path / "config_sentence_transformers.json").write_text(json.dumps(told))
        assert pooling_of(tmp_path).before == before
    (tmp_path / "config_sentence_transformers.json").unlink()
    for name, length in (("bert", "256"), ("xlm-roberta", "512"), ("bert", "null"), ("bert", "true")):
        file = tmp_path / f"sentence_{name}_config.json"
        file.write_text(f'{{"max_seq_length": {length}, "do_lower_case": false}}')
        assert pooling_of(tmp_path).max_length == (int(length) if length.isdigit() else None)
        file.unlink()
    for config, named in (
        ({"pooling_mode_mean_tokens": True, "pooling_mode_lasttoken": True}, "_mean_tokens and pooling_mode_lasttoken"),
        ({"pooling_mode_weightedmean_tokens": True, "pooling_mode_mean_tokens": False}, "weightedmean_tokens, "),
        ({"pooling_mode": "weightedmean"}, "'weightedmean'"),
        ({"pooling_mode_lasttoken": True, "include_prompt": False}, "include_prompt"),
    ):
        pooling(**config)
        told = pooling_of(tmp_path).unsupported
        assert ("not one of" in told or "not known here" in told) and named in told
    for kind in ("cls", "max"):
        pooling(pooling_mode=kind)
        assert pooling_of(tmp_path).pooling_type == kind
    modules("Transformer", "Pooling", "LayerNorm")
    assert "LayerNorm" in pooling_of(tmp_path).unsupported
    modules("Transformer", "Pooling", "Normalize", "Dense")
    (tmp_path / "config.json").write_text("{}")
    assert "order" in pooling_of(tmp_path).unsupported


def test_what_a_gguf_file_says() -> None:
    def of(kind: object) -> PoolingDefaults:
        return pooling_of_gguf({"general.architecture": "qwen3", "qwen3.pooling_type": kind})

    assert pooling_of_gguf({"general.architecture": "qwen3"}) == of(0) == of(3) == PoolingDefaults()
    assert of(1).pooling_type == "mean"
    assert "pooling_type 4" in of(4).unsupported


def test_a_model_that_cannot_is_refused_with_its_reason() -> None:
    with pytest.raises(InvalidRequestError, match="Dense"):
        resolve_pooling(None, PoolingDefaults(unsupported="Dense"), 8)
    mean = resolve_pooling(PoolingParams(pooling_type="Mean", dimensions=8), PoolingDefaults(), 8)
    assert (mean.kind, mean.normalize) == ("mean", True)
    tokens = resolve_pooling(PoolingParams(task="token_embed"), PoolingDefaults(), 8)
    assert (tokens.kind, tokens.normalize) == ("all", False)
    with pytest.raises(InvalidRequestError, match="on both sides"):
        pairs_of([], ["a"])
