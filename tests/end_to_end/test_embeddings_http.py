"""Embeddings, scores and rankings as their clients see them: openai-python's own types, Jina's and Cohere's shapes."""

from __future__ import annotations

import base64
from collections.abc import Iterator
from typing import Any

import httpx
import numpy as np
import openai
import pytest
from serving import serving
from tiny_embedder import save_bare_embedder, sentence_transformer

TEXTS = ["cats purr", "dogs bark", "a", "cats purr loudly"]


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    path = tmp_path_factory.mktemp("served") / "embedder"
    save_bare_embedder(path)
    sentence_transformer(path, "pooling_mode_lasttoken", normalize=True, prompts={"query": "Find: "})
    options = ["--served-model-name", "embedder", "--kv-cache-memory", "64MiB", "--max-model-len", "256"]
    with serving(str(path), "--dtype", "float32", "--compile", "none", *options) as url:
        yield url


@pytest.fixture(scope="module")
def client(base: str) -> openai.OpenAI:
    return openai.OpenAI(base_url=f"{base}/v1", api_key="none", max_retries=0)


def post(base: str, path: str, body: dict[str, Any], status: int = 200) -> Any:
    reply = httpx.post(base + path, json=body, timeout=60)
    assert reply.status_code == status, reply.text
    return reply.json()


def vectors(reply: Any) -> np.ndarray:
    return np.array([each.embedding for each in reply.data], dtype=np.float32)


def test_the_sdk_s_floats_and_base64_are_equal(base: str, client: openai.OpenAI) -> None:
    by_default = client.embeddings.create(model="embedder", input=TEXTS)  # the SDK asks for base64 and decodes it
    strict = openai.OpenAI(
        base_url=client.base_url, api_key="none", _strict_response_validation=True
    )  # which knows floats alone
    floats = strict.embeddings.create(model="embedder", input=TEXTS, encoding_format="float")
    assert [each.index for each in floats.data] == [0, 1, 2, 3]
    # Two requests, whose prompts may be computed in batches of their own: equal but for the order of sums.
    np.testing.assert_allclose(vectors(by_default), vectors(floats), atol=1e-5)
    np.testing.assert_allclose(np.linalg.norm(vectors(floats), axis=1), 1, rtol=1e-5)
    assert floats.usage.prompt_tokens == floats.usage.total_tokens == sum(map(len, TEXTS))
    raw = post(base, "/v1/embeddings", {"input": TEXTS[0], "encoding_format": "base64"})["data"][0]["embedding"]
    np.testing.assert_allclose(np.frombuffer(base64.b64decode(raw), dtype="<f4"), vectors(by_default)[0], atol=1e-5)


def test_inputs_of_every_shape(base: str, client: openai.OpenAI) -> None:
    one = vectors(client.embeddings.create(model="embedder", input=TEXTS[0]))
    ids = post(base, "/tokenize", {"prompt": TEXTS[0]})["tokens"]
    for given in (ids, [ids], [TEXTS[0]]):
        np.testing.assert_allclose(vectors(client.embeddings.create(model="embedder", input=given)), one, atol=1e-5)
    many = client.embeddings.create(model="embedder", input=[TEXTS[i % 4] for i in range(300)])
    np.testing.assert_allclose(vectors(many)[::4], np.repeat(one, 75, axis=0), atol=1e-5)
    cut = client.embeddings.create(model="embedder", input=TEXTS[0], dimensions=8)
    np.testing.assert_allclose(vectors(cut), one[:, :8] / np.linalg.norm(one[:, :8]), atol=1e-5)
    asked = post(base, "/v1/embeddings", {"input": TEXTS[0], "prompt_name": "query"})
    whole = post(base, "/v1/embeddings", {"input": "Find: " + TEXTS[0]})
    assert asked["usage"] == whole["usage"]
    np.testing.assert_allclose(asked["data"][0]["embedding"], whole["data"][0]["embedding"], atol=1e-5)


def test_what_is_wrong_is_named(base: str, client: openai.OpenAI) -> None:
    wrong: list[tuple[dict[str, Any], str]] = [
        ({"input": []}, "input"),
        ({}, "input"),
        ({"input": "a", "dimensions": 65}, "dimensions"),
        ({"input": ["a"] * 2049}, "input"),
        ({"input": "a" * 257}, "input"),
        ({"input": [[]]}, "input"),
        ({"input": "a", "encoding_format": "int8"}, "encoding_format"),
        ({"input": "a", "prompt_name": "x"}, "prompt_name"),
        ({"input": "a", "truncate_prompt_tokens": 0}, "truncate_prompt_tokens"),
    ]
    for body, param in wrong:
        assert post(base, "/v1/embeddings", body, 400)["error"]["param"] == param, body
    assert len(post(base, "/v1/embeddings", {"input": "a" * 257, "truncate_prompt_tokens": -1})["data"]) == 1
    with pytest.raises(openai.BadRequestError, match="embedding model"):
        client.completions.create(model="embedder", prompt="a")
    with pytest.raises(openai.BadRequestError, match="embedding model"):
        client.chat.completions.create(model="embedder", messages=[{"role": "user", "content": "a"}])


def test_the_text_at_fault_is_named_by_its_place_in_the_body(base: str) -> None:
    wrong: list[tuple[str, dict[str, Any], str]] = [
        ("/v1/embeddings", {"input": ["a", "b", ""]}, "input[2]"),
        ("/v1/embeddings", {"input": ""}, "input"),
        ("/v1/embeddings", {"input": [[1], []]}, "input[1]"),
        ("/rerank", {"query": "a", "documents": ["b" * 10, "c", "d" * 257]}, "documents[2]"),
        ("/rerank", {"query": "a" * 257, "documents": ["b"]}, "query"),
        ("/v1/score", {"text_1": "a", "text_2": ["a", "b" * 257]}, "text_2[1]"),
    ]
    for path, body, place in wrong:
        error = post(base, path, body, 400)["error"]
        assert error["message"].startswith(f"{place}: "), error
        assert error["param"] == place.partition("[")[0]
    told = post(base, "/api/embed", {"model": "embedder", "input": ["a", ""]}, 400)["error"]
    assert told.startswith("input[1]: ")


@pytest.mark.parametrize("extra", [{}, {"add_special_tokens": False}])
@pytest.mark.parametrize("length", [300, 2000, 500_000])
def test_texts_of_any_length_are_cut(base: str, length: int, extra: dict[str, Any]) -> None:
    body = {"model": "embedder", "input": "ab" * (length // 2)}
    for most in (32, -1):
        asked = body | extra | {"truncate_prompt_tokens": most}
        assert post(base, "/v1/embeddings", asked)["usage"]["prompt_tokens"] == (256 if most == -1 else most)
    error = post(base, "/v1/embeddings", body | extra, 400)["error"]
    assert error["param"] == "input" and "(max_model_len)" in error["message"]
    if not extra:
        assert "truncate_prompt_tokens" in error["message"]
        assert post(base, "/api/embed", body)["prompt_eval_count"] == 256
        assert "(max_model_len)" in post(base, "/api/embed", body | {"truncate": False}, 400)["error"]
    texts = {"query": "a", "documents": ["c", "b" * length]}
    error = post(base, "/rerank", texts, 400)["error"]
    assert error["param"] == "documents" and "truncate_prompt_tokens" in error["message"]
    assert len(post(base, "/rerank", texts | {"truncate_prompt_tokens": -1})["results"]) == 2


def test_a_text_may_fill_the_whole_context(base: str) -> None:
    assert post(base, "/v1/embeddings", {"input": "a" * 256})["usage"]["prompt_tokens"] == 256
    error = post(base, "/v1/embeddings", {"input": "a" * 257}, 400)["error"]
    assert error["code"] == "context_length_exceeded" and "257 tokens" in error["message"]
    assert "generate" not in error["message"]


def test_scores_and_rankings(base: str, client: openai.OpenAI) -> None:
    given = ["Find: cats", *TEXTS]
    found = vectors(client.embeddings.create(model="embedder", input=given))
    expected = found[1:] @ found[0]
    scores = post(base, "/v1/score", {"text_1": "cats", "text_2": TEXTS})
    np.testing.assert_allclose([each["score"] for each in scores["data"]], expected, atol=1e-5)
    assert scores["usage"]["prompt_tokens"] == sum(map(len, given))
    again = post(base, "/score", {"queries": ["cats"], "documents": TEXTS})
    np.testing.assert_allclose([each["score"] for each in again["data"]], expected, atol=1e-5)
    order = np.argsort(-expected, kind="stable").tolist()
    jina = post(base, "/v1/rerank", {"model": "embedder", "query": "cats", "documents": TEXTS, "top_n": 3})
    assert [each["index"] for each in jina["results"]] == order[:3]
    assert [each["document"]["text"] for each in jina["results"]] == [TEXTS[i] for i in order[:3]]
    cohere = post(base, "/v2/rerank", {"model": "embedder", "query": "cats", "documents": [{"text": t} for t in TEXTS]})
    assert [each["index"] for each in cohere["results"]] == order
    assert all(set(each) == {"index", "relevance_score"} for each in cohere["results"])
    for body, param in (({"query": "a", "documents": [{"title": "b"}]}, "documents"), ({"query": "a"}, "documents")):
        assert post(base, "/rerank", body, 400)["error"]["param"] == param
    assert post(base, "/score", {"text_1": ["a", "b"], "text_2": ["c"] * 3}, 400)["error"]["param"] == "text_2"
