"""/classify, /pooling, /score and /rerank of models that judge texts, in vLLM's, Jina's and Cohere's shapes."""

from __future__ import annotations

from typing import Any

import httpx
import numpy as np
import pytest
from serving import serving
from test_classifiers import logits_of, save_judge, softmax

OPTIONS = ["--served-model-name", "judge", "--kv-cache-memory", "64MiB", "--max-model-len", "256"]
TEXTS = ["cats purr", "dogs bark", "a"]


def post(base: str, path: str, body: dict[str, Any], status: int = 200) -> Any:
    reply = httpx.post(base + path, json=body, timeout=60)
    assert reply.status_code == status, reply.text
    return reply.json()


def ids_of(text: str, base: str) -> list[int]:
    return post(base, "/tokenize", {"prompt": text})["tokens"]  # type: ignore[no-any-return]


def test_classes(tmp_path: Any) -> None:
    path = tmp_path / "judge"
    model = save_judge("Qwen2", path, id2label={0: "bad", 1: "fair", 2: "good"})
    with serving(str(path), "--dtype", "float32", "--compile", "none", *OPTIONS) as base:
        reply = post(base, "/classify", {"model": "judge", "input": TEXTS})
        logits = [logits_of(model, ids_of(text, base)) for text in TEXTS]
        for each, expected in zip(reply["data"], logits, strict=True):
            np.testing.assert_allclose(each["probs"], softmax(expected), atol=1e-4)
            assert each["label"] == ("bad", "fair", "good")[int(expected.argmax())] and each["num_classes"] == 3
        assert reply["usage"]["prompt_tokens"] == sum(len(ids_of(text, base)) for text in TEXTS)
        raw = post(base, "/pooling", {"input": TEXTS, "use_activation": False})
        np.testing.assert_allclose([each["data"] for each in raw["data"]], logits, atol=1e-4, rtol=1e-4)
        tokens = post(base, "/pooling", {"input": TEXTS[0], "task": "token_embed"})
        assert np.array(tokens["data"][0]["data"]).shape == (len(ids_of(TEXTS[0], base)), 64)
        assert len(post(base, "/v1/embeddings", {"input": TEXTS[0]})["data"][0]["embedding"]) == 64
        assert post(base, "/score", {"text_1": "a", "text_2": "b"}, 400)["error"]["param"] == "model"
        for number in (0, -2):
            wrong = {"input": "a", "truncate_prompt_tokens": number}
            assert post(base, "/classify", wrong, 400)["error"]["param"] == "truncate_prompt_tokens"
        assert post(base, "/pooling", {"input": "a", "normalize": True}, 400)["error"]["param"] == "normalize"
        wrong = {"input": "a", "task": "token_classify"}
        assert post(base, "/pooling", wrong, 400)["error"]["param"] == "task"
        assert "model that judges texts" in post(base, "/v1/completions", {"prompt": "a"}, 400)["error"]["message"]


def test_each_token_is_judged_at_pooling(tmp_path: Any) -> None:
    path = tmp_path / "judge"
    save_judge("Qwen2", path, "TokenClassification", num_labels=5)
    with serving(str(path), "--dtype", "float32", "--compile", "none", *OPTIONS) as base:
        error = post(base, "/classify", {"input": "a"}, 400)["error"]
        assert error["param"] == "model" and "/pooling" in error["message"]
        assert np.array(post(base, "/pooling", {"input": "ab"})["data"][0]["data"]).shape == (2, 5)
        assert "judges each token" in post(base, "/v1/completions", {"prompt": "a"}, 400)["error"]["message"]


def test_a_cross_encoder_ranks(tmp_path: Any) -> None:
    path = tmp_path / "judge"
    model = save_judge("Qwen2", path, num_labels=1)
    with serving(str(path), "--dtype", "float32", "--compile", "none", *OPTIONS) as base:
        logits = np.array([logits_of(model, ids_of("cats" + text, base))[0] for text in TEXTS])
        expected = 1 / (1 + np.exp(-logits))
        scores = post(base, "/v1/score", {"text_1": "cats", "text_2": TEXTS})
        np.testing.assert_allclose([each["score"] for each in scores["data"]], expected, atol=1e-4)
        raw = post(base, "/score", {"text_1": "cats", "text_2": TEXTS, "use_activation": False})
        np.testing.assert_allclose([each["score"] for each in raw["data"]], logits, atol=1e-4, rtol=1e-4)
        ranked = post(base, "/rerank", {"query": "cats", "documents": TEXTS})["results"]
        assert [each["index"] for each in ranked] == np.argsort(-expected, kind="stable").tolist()
        cut = post(base, "/rerank", {"query": "cats", "documents": [TEXTS[0]], "max_tokens_per_doc": 2})["results"]
        expected_cut = logits_of(model, [*ids_of("cats", base), *ids_of(TEXTS[0], base)[:2]])[0]
        assert cut[0]["relevance_score"] == pytest.approx(1 / (1 + np.exp(-expected_cut)), abs=1e-4)
        whole = post(base, "/rerank", {"query": "cats", "documents": TEXTS, "max_tokens_per_doc": 2**64})["results"]
        assert [{**each, "relevance_score": 0} for each in whole] == [{**each, "relevance_score": 0} for each in ranked]
        of_whole, of_ranked = ([each["relevance_score"] for each in answer] for answer in (whole, ranked))
        np.testing.assert_allclose(
            of_whole, of_ranked, atol=1e-6
        )  # products of dense float32 depend on who is in the step
        for number in (0, -2):
            wrong = {"text_1": "a", "text_2": "b", "truncate_prompt_tokens": number}
            assert post(base, "/score", wrong, 400)["error"]["param"] == "truncate_prompt_tokens"
        for side in ("query", "documents"):
            for length in (300, 10**5):
                long = "c" * length
                wrong = {"query": "a", "documents": ["b"]} | {side: long if side == "query" else [long]}
                error = post(base, "/rerank", wrong, 400)["error"]
                assert error["param"] == side or length == 300, "a pair that is too long has a document"
                assert "truncate_prompt_tokens" in error["message"]
                cut = post(base, "/rerank", wrong | {"truncate_prompt_tokens": -1})
                assert cut["usage"]["prompt_tokens"] == 256
        error = post(base, "/score", {"text_1": "a", "text_2": ["b", "c" * 300]}, 400)["error"]
        assert error["message"].startswith("text_2[1]: ")
