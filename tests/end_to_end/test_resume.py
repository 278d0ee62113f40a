"""A core that is killed is a pause: every request goes on behind what its caller has, and says what it would have
said."""

from __future__ import annotations

import asyncio
import os
import re
import signal
from pathlib import Path
from random import Random
from typing import Any

import pytest
from tiny_families import save_tiny

from engine import AsyncEngine, RequestOutput, SamplingParams, StructuredOutputsParams
from engine.config import make_args
from engine.errors import CoreDiedError
from engine.replicas.client import ReplicatedClient

pytestmark = pytest.mark.timeout(300)

DRAFTS = {"method": "ngram", "num_speculative_tokens": 3}
FORM = r"([a-f]{3} ){12,20}= [0-9]{3}"
KINDS: dict[str, SamplingParams] = {
    "greedy": SamplingParams(temperature=0.0, max_tokens=60, ignore_eos=True),
    "sampled": SamplingParams(temperature=0.9, top_p=0.95, seed=3, max_tokens=60, ignore_eos=True),
    "samples": SamplingParams(n=3, temperature=1.0, seed=5, max_tokens=40, ignore_eos=True),
    "grammar": SamplingParams(
        temperature=1.0, seed=7, max_tokens=200, structured_outputs=StructuredOutputsParams(regex=FORM)
    ),
    "penalties": SamplingParams(
        temperature=0.0, presence_penalty=0.7, repetition_penalty=1.2, max_tokens=60, min_tokens=50, ignore_eos=True
    ),
    "logprobs": SamplingParams(temperature=0.0, logprobs=2, prompt_logprobs=1, max_tokens=60, ignore_eos=True),
    "bans": SamplingParams(temperature=0.0, logit_bias={70: 4.0}, bad_words=["b"], max_tokens=60, ignore_eos=True),
    "beams": SamplingParams(use_beam_search=True, best_of=3, n=2, temperature=0.0, max_tokens=20, ignore_eos=True),
}
PROMPTS = {name: [3 + (7 * i * i + place) % 240 for i in range(12 + 9 * place)] for place, name in enumerate(KINDS)}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("resume")
    save_tiny("Llama", path)
    return path


Likeliest = dict[int, float]


def likeliest(of_tokens: Any) -> list[Likeliest]:
    return [{token: one.logprob for token, one in (each or {}).items()} for each in of_tokens or ()]


class Answer:
    """What a caller has seen of a request, which never becomes less."""

    def __init__(self) -> None:
        self.tokens: dict[int, list[int]] = {}
        self.texts: dict[int, str] = {}
        self.logprobs: list[Likeliest] = []
        self.prompt_logprobs: list[Likeliest] = []
        self.moves = 0

    def see(self, output: RequestOutput) -> None:
        for sample in output.outputs:
            before = self.tokens.get(sample.index, [])
            assert list(sample.token_ids[: len(before)]) == before and sample.text.startswith(
                self.texts.get(sample.index, "")
            )
            self.tokens[sample.index], self.texts[sample.index] = list(sample.token_ids), sample.text
        self.moves = output.metrics.num_moves if output.metrics else 0
        if output.finished:
            first = output.outputs[0]
            assert all(each.finish_reason in ("length", "stop") for each in output.outputs), first.stop_reason
            self.logprobs = likeliest(first.logprobs)
            self.prompt_logprobs = likeliest(output.prompt_logprobs)

    @property
    def count(self) -> int:
        return sum(map(len, self.tokens.values()))


async def ask(engine: AsyncEngine, name: str, answer: Answer) -> None:
    async for output in engine.generate({"prompt_token_ids": PROMPTS[name]}, KINDS[name], name):
        answer.see(output)


async def answers(engine: AsyncEngine, kill_at: list[int]) -> dict[str, Answer]:
    """Of all kinds at once; the core is killed whenever as many tokens have come."""
    found = {name: Answer() for name in KINDS}
    asked = [asyncio.create_task(ask(engine, name, answer)) for name, answer in found.items()]
    for wanted in kill_at:
        while sum(answer.count for answer in found.values()) < wanted:
            assert not all(task.done() for task in asked)
            await asyncio.sleep(0.001)
        client = engine._require().client
        assert isinstance(client, ReplicatedClient)
        while not client._fleet.replicas:  # the one before has not been followed yet
            await asyncio.sleep(0.001)
        [replica] = client._fleet.replicas
        os.kill(replica.client.pid, signal.SIGKILL)
        while replica in client._fleet.replicas:
            await asyncio.sleep(0.001)
    await asyncio.gather(*asked)
    return found


@pytest.mark.parametrize(
    "settings",
    [
        {"speculative_config": DRAFTS, "dtype": "bfloat16", "batch_invariant": True},
        pytest.param({"speculative_config": DRAFTS}, marks=pytest.mark.exhaustive),
        pytest.param({}, marks=pytest.mark.exhaustive),
        pytest.param({"dtype": "bfloat16", "batch_invariant": True}, marks=pytest.mark.exhaustive),
        pytest.param({"tensor_parallel_size": 2}, marks=pytest.mark.exhaustive),
        pytest.param({"max_num_batched_tokens": 32, "kv_cache_memory": 1 << 18}, marks=pytest.mark.exhaustive),
    ],
)
def test_answers_of_every_kind_go_on_behind_what_was_given(model: Path, settings: dict[str, Any]) -> None:
    options = {"dtype": "float32", "device": "cpu", "max_model_len": 256, "kv_cache_memory": 8 << 20, "threads": 1}
    args = make_args(str(model), {**options, "compile": "none", "core_restarts": 20, **settings})

    async def main() -> tuple[dict[str, Answer], dict[str, Answer]]:
        async with AsyncEngine(args, in_process=False) as engine:
            undisturbed = await answers(engine, [])
            random = Random(4)
            found = await answers(engine, sorted(random.randrange(20, 300) for _ in range(2)))
            assert engine.stats().kv_blocks_used == 0
            return undisturbed, found

    undisturbed, found = asyncio.run(main())
    for name, answer in found.items():
        wanted = undisturbed[name]
        assert (answer.tokens, answer.texts) == (wanted.tokens, wanted.texts), name
        for ours, theirs in ((answer.logprobs, wanted.logprobs), (answer.prompt_logprobs, wanted.prompt_logprobs)):
            assert ours == theirs if settings.get("batch_invariant") else len(ours) == len(theirs), name
    assert not any(answer.moves for answer in undisturbed.values())
    assert max(answer.moves for answer in found.values()) in (1, 2)
    assert re.fullmatch(FORM, found["grammar"].texts[0])
    assert len(found["logprobs"].logprobs) == 60
    assert len(found["logprobs"].prompt_logprobs) == len(PROMPTS["logprobs"])


def test_without_restarts_the_first_death_is_the_engines(model: Path) -> None:
    options = {"dtype": "float32", "device": "cpu", "max_model_len": 256, "kv_cache_memory": 8 << 20, "threads": 1}
    args = make_args(str(model), {**options, "compile": "none", "core_restarts": 0})

    async def main() -> None:
        async with AsyncEngine(args, in_process=False) as engine:
            os.kill(engine._require().client.pid, signal.SIGKILL)  # type: ignore[attr-defined]
            with pytest.raises(CoreDiedError, match="SIGKILL"):
                await ask(engine, "greedy", Answer())

    asyncio.run(main())
