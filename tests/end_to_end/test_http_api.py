"""The server as its clients see it: openai-python's own types, errors, cancellation, cached tokens; on SmolLM2."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterator

import httpx
import openai
import pytest
from openai.types import Completion
from openai.types.chat import ChatCompletion, ChatCompletionChunk
from serving import metric, serving
from smollm2 import smollm2_path

QUESTION = [{"role": "user", "content": "What is the capital of France? Answer in one sentence."}]


@pytest.fixture(scope="module")
def base() -> Iterator[str]:
    # float32: in bf16 the rounding of a row depends on the batch, and a near tie among tokens may go either way
    options = ["--served-model-name", "smollm2", "--kv-cache-memory", "1GiB", "--max-model-len", "2048"]
    with serving(smollm2_path(), "--dtype", "float32", "--compile", "none", *options) as url:
        yield url


@pytest.fixture(scope="module")
def client(base: str) -> openai.OpenAI:
    return openai.OpenAI(base_url=f"{base}/v1", api_key="none", max_retries=0)


def valid(reply: openai.BaseModel) -> None:
    """The reply satisfies the client's own type, which openai-python does not check by itself."""
    type(reply).model_validate(reply.model_dump())


def test_chat_answers_sensibly(client: openai.OpenAI) -> None:
    reply = client.chat.completions.create(model="smollm2", messages=QUESTION, temperature=0, max_tokens=32)
    valid(reply)
    assert isinstance(reply, ChatCompletion)
    assert "Paris" in (reply.choices[0].message.content or "")
    assert reply.choices[0].finish_reason == "stop"
    assert reply.usage is not None and reply.usage.completion_tokens > 0


def test_streamed_chat_equals_whole_chat(client: openai.OpenAI) -> None:
    whole = client.chat.completions.create(model="smollm2", messages=QUESTION, temperature=0, max_tokens=24)
    chunks: list[ChatCompletionChunk] = list(
        client.chat.completions.create(
            model="smollm2",
            messages=QUESTION,
            temperature=0,
            max_tokens=24,
            stream=True,
            stream_options={"include_usage": True},
        )
    )
    for chunk in chunks:
        valid(chunk)
    text = "".join(c.choices[0].delta.content or "" for c in chunks if c.choices)
    assert text == whole.choices[0].message.content
    assert chunks[-1].usage is not None and whole.usage is not None
    assert chunks[-1].usage.completion_tokens == whole.usage.completion_tokens
    assert [c.choices[0].finish_reason for c in chunks if c.choices][-1] == whole.choices[0].finish_reason


def test_chat_logprobs_n_and_seed(client: openai.OpenAI) -> None:
    def ask() -> ChatCompletion:
        return client.chat.completions.create(
            model="smollm2",
            messages=QUESTION,
            n=3,
            seed=5,
            temperature=1.2,
            max_tokens=12,
            logprobs=True,
            top_logprobs=4,
        )

    first, second = ask(), ask()
    valid(first)
    assert [c.index for c in first.choices] == [0, 1, 2]
    texts = [c.message.content for c in first.choices]
    assert texts == [c.message.content for c in second.choices]
    assert len(set(texts)) > 1
    for choice in first.choices:
        assert choice.logprobs is not None and choice.logprobs.content is not None
        assert all(len(at.top_logprobs) == 4 and at.logprob <= 0 for at in choice.logprobs.content)
        top = [[t.logprob for t in at.top_logprobs] for at in choice.logprobs.content]
        assert all(row == sorted(row, reverse=True) for row in top)


def test_completions_logprobs_and_stop(client: openai.OpenAI) -> None:
    reply = client.completions.create(
        model="smollm2",
        prompt="The capital of France is",
        temperature=0,
        max_tokens=24,
        logprobs=3,
        stop=["Eiffel", "."],
    )
    valid(reply)
    choice = reply.choices[0]
    assert "." not in choice.text and choice.finish_reason == "stop"
    assert choice.logprobs is not None and choice.logprobs.token_logprobs is not None
    assert all(value <= 0 for value in choice.logprobs.token_logprobs)


def test_echo_scores_the_prompt_after_its_first_token(client: openai.OpenAI) -> None:
    """The first token has no log-probability: null, as OpenAI's own API sends it."""
    prompt = "The capital of France is"
    reply = client.completions.create(
        model="smollm2", prompt=prompt, temperature=0, max_tokens=2, logprobs=1, echo=True
    )
    choice = reply.choices[0]
    assert choice.text.startswith(prompt)
    assert choice.logprobs is not None and choice.logprobs.tokens is not None
    assert choice.logprobs.token_logprobs is not None
    assert choice.logprobs.token_logprobs[0] is None
    assert all(value <= 0 for value in choice.logprobs.token_logprobs[1:])
    assert "".join(choice.logprobs.tokens) == choice.text


def test_streamed_completions_of_many_prompts(client: openai.OpenAI) -> None:
    prompts = ["One, two, three,", "Monday, Tuesday,"]
    whole = client.completions.create(model="smollm2", prompt=prompts, temperature=0, max_tokens=12, n=2)
    texts = dict.fromkeys(range(4), "")
    for chunk in client.completions.create(
        model="smollm2", prompt=prompts, temperature=0, max_tokens=12, n=2, logprobs=1, stream=True
    ):
        assert isinstance(chunk, Completion)
        for choice in chunk.choices:
            texts[choice.index] += choice.text
    assert [texts[i] for i in range(4)] == [c.text for c in sorted(whole.choices, key=lambda c: c.index)]


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({"temperature": -1}, "temperature"),
        ({"max_tokens": 0}, "max_tokens"),
        ({"prompt": [[10**9]]}, "prompt"),
        ({"prompt": [5] * 4000}, "prompt"),
        ({"logprobs": 10**6}, "logprobs"),
        ({"typical_p": 0.5}, "typical_p"),
        ({"best_of": 3, "stream": True}, "best_of"),
        ({"stream_options": {"include_usage": True}}, "stream_options"),
        ({"model": "other"}, "model"),
    ],
)
def test_bad_requests_are_refused_in_openai_shape(base: str, body: dict[str, object], param: str | None) -> None:
    reply = httpx.post(f"{base}/v1/completions", json={"model": "smollm2", "prompt": "x", **body}, timeout=30)
    assert reply.status_code in (400, 404)
    error = reply.json()["error"]
    assert set(error) == {"message", "type", "param", "code"}
    assert error["param"] == param and error["message"]


def test_tokenize_and_back(base: str) -> None:
    tokens = httpx.post(f"{base}/tokenize", json={"prompt": "Hello, wörld"}).json()
    assert tokens["count"] == len(tokens["tokens"])
    assert httpx.post(f"{base}/detokenize", json={"tokens": tokens["tokens"]}).json() == {"prompt": "Hello, wörld"}


def test_repeated_prompt_computes_at_most_one_block_again(base: str) -> None:
    prompt = [100 + (i * 7919) % 20000 for i in range(600)]
    body = {"model": "smollm2", "prompt": prompt, "max_tokens": 1, "temperature": 0}
    first = httpx.post(f"{base}/v1/completions", json=body, timeout=120).json()
    second = httpx.post(f"{base}/v1/completions", json=body, timeout=120).json()
    assert first["usage"]["prompt_tokens_details"]["cached_tokens"] == 0
    block = 600 - second["usage"]["prompt_tokens_details"]["cached_tokens"]
    assert 1 <= block <= 16
    assert second["choices"] == first["choices"]


def test_closed_connections_free_all_blocks_within_a_few_steps(base: str) -> None:
    """200 requests of 2,000 tokens; every client leaves; the next request is served. To finish all would take hundreds
    of steps."""
    while metric(base, "pageloom_compiling") > 0:
        time.sleep(0.1)

    async def leave() -> None:
        limits = httpx.Limits(max_connections=None)
        async with httpx.AsyncClient(timeout=120, limits=limits) as http:

            async def one(i: int) -> None:
                body = {"model": "smollm2", "prompt": [200 + i] * 2000, "max_tokens": 40, "stream": i % 2 == 0}
                await http.post(f"{base}/v1/completions", json=body)

            tasks = [asyncio.create_task(one(i)) for i in range(200)]
            await asyncio.sleep(4)
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    asyncio.run(leave())
    steps = metric(base, "pageloom_engine_steps_total")
    while metric(base, "pageloom_kv_cache_usage_ratio") > 0 or metric(base, "pageloom_num_requests_waiting") > 0:
        assert metric(base, "pageloom_engine_steps_total") < steps + 40, "blocks are still held"
        time.sleep(0.02)
    reply = httpx.post(f"{base}/v1/completions", json={"model": "smollm2", "prompt": "Hi", "max_tokens": 4}, timeout=60)
    assert reply.status_code == 200
