"""Several replicas of a real model: the tokens of one, whoever computes them and whoever dies."""

from __future__ import annotations

import asyncio
import os
import re
import signal
import time
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest
from serving import metric, serving
from tiny_families import save_tiny

from engine import LLM, AsyncEngine, SamplingParams
from engine.config import make_args
from engine.errors import ConfigError
from engine.replicas.client import ReplicatedClient

PROMPTS = [{"prompt_token_ids": [3 + (7 * i * i + j) % 400 for j in range(20 + 9 * i)]} for i in range(12)]
PARAMS = [
    SamplingParams(
        temperature=0.0 if i % 2 else 0.9,
        n=1 + i % 3 * (1 - i % 2),
        max_tokens=6 + i,
        seed=i,
        logprobs=2 if i % 4 == 1 else None,
        presence_penalty=0.5 if i % 4 == 2 else 0.0,
        ignore_eos=True,
    )
    for i in range(12)
]
SETTINGS: dict[str, object] = {
    "dtype": "float32",
    "device": "cpu",
    "max_model_len": 512,
    "kv_cache_memory": 8 << 20,
    "compile": "none",
    "threads": 1,
}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("replicas")
    save_tiny("Llama", path)
    return path


def told(llm: LLM) -> tuple[list[list[int]], list[float]]:
    """Tokens and the sums of their log-probabilities, of each sample."""
    samples = [each for output in llm.generate(PROMPTS, PARAMS, use_tqdm=False) for each in output.outputs]
    return [list(each.token_ids) for each in samples], [each.cumulative_logprob or 0.0 for each in samples]


def test_two_replicas_and_one_core_say_the_same(model: Path) -> None:
    with LLM(str(model), **SETTINGS) as llm:
        tokens, logprobs = told(llm)
    with LLM(str(model), data_parallel_size=2, **SETTINGS) as llm:
        # The last bits of a float32 logit depend on who else is in a step.
        assert told(llm) == (tokens, pytest.approx(logprobs, abs=1e-4))
        assert llm.stats().replicas == 2
        client = llm._session.client
        assert isinstance(client, ReplicatedClient)
        assert all(replica.stats.generated_tokens > 20 for replica in client._fleet.replicas)
        [vector] = llm.embed({"prompt_token_ids": [5, 6, 7]}, use_tqdm=False)
        assert len(vector.outputs.embedding) == 64


@pytest.mark.exhaustive  # four processes
def test_two_replicas_of_two_ranks_say_the_same(model: Path) -> None:
    with LLM(str(model), **SETTINGS) as llm:
        tokens, logprobs = told(llm)
    with LLM(str(model), data_parallel_size=2, tensor_parallel_size=2, **SETTINGS) as llm:
        assert told(llm) == (tokens, pytest.approx(logprobs, abs=1e-4))


def test_a_stream_goes_on_when_its_replica_is_killed_and_replicas_come_and_go(model: Path) -> None:
    params = SamplingParams(temperature=0.0, max_tokens=300, ignore_eos=True)

    async def tokens(engine: AsyncEngine, index: int, kill_at: int | None = None) -> list[int]:
        found: list[int] = []
        async for output in engine.generate(PROMPTS[index], params, f"r{index}", delta=True):
            found += output.outputs[0].token_ids
            if kill_at is not None and len(found) >= kill_at:
                client, kill_at = engine._require().client, None
                assert isinstance(client, ReplicatedClient)
                [name] = [each for each in client._fleet._deliveries._sequences if each.startswith(f"r{index}")]
                number = client._fleet._deliveries.replica_of(name)
                [victim] = [each for each in client._fleet.replicas if each.number == number]
                os.kill(victim.client.pid, signal.SIGKILL)
        return found

    async def main() -> None:
        args = make_args(str(model), {"data_parallel_size": 2, "core_restarts": 0, **SETTINGS})
        async with AsyncEngine(args) as engine:
            wanted = await asyncio.gather(*(tokens(engine, index) for index in range(6)))
            killed = await asyncio.gather(*(tokens(engine, index, 100 if index == 3 else None) for index in range(6)))
            assert killed == wanted and engine.stats().replicas == 1
            scaling = asyncio.create_task(engine.scale(2))
            assert await tokens(engine, 1) == wanted[1]
            await scaling
            running = [asyncio.create_task(tokens(engine, index)) for index in range(6)]
            await asyncio.sleep(0.05)
            await engine.scale(1, drain_timeout_s=0.0)
            assert await asyncio.gather(*running) == wanted
            with pytest.raises(ConfigError, match=r"replicas must be in \[1, 64\], got 0"):
                await engine.scale(0)

    asyncio.run(main())


@pytest.fixture(scope="module")
def base(model: Path) -> Iterator[str]:
    options = [f"--{name.replace('_', '-')}={value}" for name, value in SETTINGS.items()]
    with serving(str(model), "--served-model-name", "tiny", "-dp", "2", *options) as url:
        yield url


def wait_for(base: str, size: int) -> None:
    """The server is told of it by itself, without a request."""
    until = time.monotonic() + 60
    while metric(base, "pageloom_replicas") != size:
        assert time.monotonic() < until
        time.sleep(0.02)


def test_a_server_is_scaled_while_it_answers(base: str) -> None:
    body = {"model": "tiny", "prompt": [5, 6, 7, 8], "max_tokens": 20, "temperature": 0, "ignore_eos": True}
    first = httpx.post(f"{base}/v1/completions", json=body).json()["choices"][0]["text"]
    for size in (3, 1):
        answer = httpx.post(f"{base}/scale_elastic_ep", json={"new_data_parallel_size": size}, timeout=60)
        assert answer.json() == {"message": f"Scaled to {size} data parallel engines"}
        wait_for(base, size)
        for name in ("num_requests_waiting", "kv_cache_usage_perc"):  # of each, as vLLM shows them
            assert len(re.findall(rf'^vllm:{name}{{engine="\d+",', httpx.get(f"{base}/metrics").text, re.M)) == size
        assert httpx.post(f"{base}/v1/completions", json=body).json()["choices"][0]["text"] == first
    assert httpx.post(f"{base}/is_scaling_elastic_ep").json() == {"is_scaling_elastic_ep": False}
    refused = httpx.post(f"{base}/scale_elastic_ep", json={"new_data_parallel_size": 65})
    assert refused.status_code == 400 and "replicas must be in [1, 64]" in refused.json()["error"]["message"]
