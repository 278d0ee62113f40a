"""The server as Ollama's own client sees it: SmolLM2 chats, and an embedder's texts as vectors."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator
from pathlib import Path

import httpx
import numpy as np
import ollama
import pytest
from serving import metric, serving
from smollm2 import smollm2_path
from tiny_embedder import save_bare_embedder, sentence_transformer

QUESTION = [{"role": "user", "content": "What is the capital of France? Answer in one sentence."}]
GREEDY = {"temperature": 0, "num_predict": 24}
TEXTS = ["cats purr", "dogs bark", "a", "cats purr loudly"]


@pytest.fixture(scope="module")
def base() -> Iterator[str]:
    # float32: in bf16 the rounding of a row depends on the batch, and a near tie among tokens may go either way
    options = ["--served-model-name", "smollm2", "--kv-cache-memory", "1GiB", "--max-model-len", "2048"]
    with serving(smollm2_path(), "--dtype", "float32", "--compile", "none", *options) as url:
        yield url


@pytest.fixture(scope="module")
def client(base: str) -> ollama.Client:
    return ollama.Client(host=base)


@pytest.fixture(scope="module")
def embedder(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    path: Path = tmp_path_factory.mktemp("served") / "embedder"
    save_bare_embedder(path)
    sentence_transformer(path, "pooling_mode_lasttoken", normalize=False)
    options = ["--served-model-name", "embedder", "--kv-cache-memory", "64MiB", "--max-model-len", "256"]
    with serving(str(path), "--dtype", "float32", "--compile", "none", *options) as url:
        yield url


def test_a_chat_says_what_openais_route_says_whole_and_streamed(base: str, client: ollama.Client) -> None:
    whole = client.chat("smollm2", messages=QUESTION, options=GREEDY)
    parts = list(client.chat("smollm2", messages=QUESTION, options=GREEDY, stream=True))
    body = {"messages": QUESTION, "temperature": 0, "max_tokens": 24}
    other = httpx.post(f"{base}/v1/chat/completions", json=body, timeout=60).json()
    assert "Paris" in (whole.message.content or "")
    assert whole.message.content == other["choices"][0]["message"]["content"]
    assert "".join(part.message.content or "" for part in parts) == whole.message.content
    usage = other["usage"]
    for one in (whole, parts[-1]):
        assert (one.prompt_eval_count, one.eval_count) == (usage["prompt_tokens"], usage["completion_tokens"])
        assert one.done and one.eval_duration and one.total_duration and one.total_duration > one.eval_duration


def test_prompts_go_on_from_their_context(client: ollama.Client) -> None:
    first = client.generate("smollm2", "My name is Ada. Say hello.", options=GREEDY)
    assert first.context and first.response
    again = client.generate("smollm2", "What is my name?", context=first.context, options=GREEDY)
    assert again.prompt_eval_count is not None and again.prompt_eval_count > len(first.context)
    raw = client.generate("smollm2", "The capital of France is", raw=True, options={**GREEDY, "num_predict": 4})
    assert "Paris" in (raw.response or "") and raw.context is None


def test_a_schema_is_kept(client: ollama.Client) -> None:
    schema = {
        "type": "object",
        "properties": {
            "capital": {"type": "string", "maxLength": 20},
            "population": {"type": "integer", "maximum": 99},
        },
        "required": ["capital", "population"],
        "additionalProperties": False,
    }
    reply = client.chat("smollm2", messages=QUESTION, format=schema, options={"temperature": 0, "num_predict": 200})
    told = json.loads(reply.message.content or "")
    assert set(told) == {"capital", "population"} and told["population"] <= 99


def test_a_stream_that_is_left_is_aborted(base: str) -> None:
    async def go() -> None:
        client = ollama.AsyncClient(host=base)
        stream = await client.chat("smollm2", messages=QUESTION, options={"num_predict": 1500}, stream=True)
        async for _ in stream:
            break
        await stream.aclose()  # type: ignore[attr-defined]
        await client._client.aclose()

    asyncio.run(go())
    for _ in range(200):
        if metric(base, "pageloom_num_requests_running") == 0:
            return
        asyncio.run(asyncio.sleep(0.05))
    raise AssertionError("it still runs")


def test_what_is_served_is_told(client: ollama.Client) -> None:
    (listed,), shown = client.list().models, client.show("smollm2")
    assert listed.model == "smollm2:latest" and listed.size and listed.size > 50_000_000
    assert shown.details is not None and shown.details.format == "gguf" and shown.details.quantization_level == "Q4_1"
    assert shown.details.parameter_size == "134.5M" and shown.modelinfo is not None
    assert shown.modelinfo["llama.context_length"] == 2048 and "completion" in (shown.capabilities or [])


def test_texts_become_vectors(embedder: str) -> None:
    client = ollama.Client(host=embedder)
    body = {"input": TEXTS, "normalize": True}
    expected = httpx.post(f"{embedder}/v1/embeddings", json=body, timeout=60).json()
    wanted = np.array([each["embedding"] for each in expected["data"]])
    made = client.embed("embedder", TEXTS)
    np.testing.assert_allclose(np.array(made.embeddings), wanted, atol=1e-5)
    np.testing.assert_allclose(np.linalg.norm(np.array(made.embeddings), axis=1), 1, rtol=1e-5)
    assert made.prompt_eval_count == sum(map(len, TEXTS)) and made.total_duration
    short = np.array(client.embed("embedder", TEXTS[0], dimensions=8).embeddings)
    np.testing.assert_allclose(short, wanted[:1, :8] / np.linalg.norm(wanted[0, :8]), atol=1e-5)
    old = np.array(client.embeddings("embedder", TEXTS[0]).embedding)
    np.testing.assert_allclose(old / np.linalg.norm(old), wanted[0], atol=1e-5)
    assert abs(np.linalg.norm(old) - 1) > 1e-3, "as the model's files say, which normalise nothing"
    assert client.embed("embedder", "").embeddings == [] and client.embed("embedder", []).embeddings == []
    assert client.show("embedder").capabilities == ["embedding"]


def test_long_texts_are_cut_or_refused(embedder: str) -> None:
    client = ollama.Client(host=embedder)
    cut, fitting = client.embed("embedder", "ab" * 300), client.embed("embedder", ("ab" * 300)[:256])
    assert cut.prompt_eval_count is not None and cut.prompt_eval_count <= 256
    np.testing.assert_allclose(
        cut.embeddings, client.embed("embedder", ("ab" * 300)[: cut.prompt_eval_count]).embeddings
    )
    assert fitting.prompt_eval_count is not None
    for wrong in ({"truncate": False, "input": "ab" * 300}, {"input": "a", "dimensions": 10_000}, {"input": [5]}):
        reply = httpx.post(f"{embedder}/api/embed", json=wrong, timeout=60)
        assert reply.status_code == 400 and set(reply.json()) == {"error"}, reply.text
    many = httpx.post(f"{embedder}/api/embed", json={"input": ["a"] * 2049}, timeout=60)
    assert many.status_code == 400 and "at most 2048 prompts" in many.json()["error"]
