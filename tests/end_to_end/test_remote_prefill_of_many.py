"""Prompts that engines of several processes compute for engines of several processes: the tokens are those of one."""

from __future__ import annotations

import random
import socket
from pathlib import Path
from typing import Any

import pytest
from test_remote_prefill import ASKED, DRAWN, GREEDY, SETTINGS, checksums, engine, with_transfer
from tiny_families import save_tiny

from engine import LLM, RequestOutput, SamplingParams

ROLLS = random.Random(4)
PROMPTS = [[ROLLS.randrange(3, 90) for _ in range(length)] for length in (5, 17, 64, 65, 120, 333)]
SMALL: dict[str, Any] = {**SETTINGS, "threads": 1}


def answers(llm: LLM, params: list[SamplingParams]) -> list[RequestOutput]:
    return llm.generate([{"prompt_token_ids": prompt} for prompt in PROMPTS], params, use_tqdm=False)


def pair_of_ports() -> int:
    """The first of two that nobody listens on."""
    while True:
        with socket.socket() as first, socket.socket() as second:
            first.bind(("127.0.0.1", 0))
            port = int(first.getsockname()[1])
            try:
                second.bind(("127.0.0.1", port + 1))
                return port
            except OSError:
                continue


@pytest.mark.exhaustive  # four processes
def test_each_replica_gives_out_and_takes_over(tmp_path: Path) -> None:
    save_tiny("Llama", tmp_path)
    with LLM(str(tmp_path), **SMALL) as alone:
        wanted = {name: answers(alone, [params] * len(PROMPTS)) for name, params in (("g", GREEDY), ("d", DRAWN))}
    port = pair_of_ports()
    many: dict[str, Any] = {"data_parallel_size": 2, **SMALL}
    with (
        engine(tmp_path, "kv_producer", port=port, **many) as source,
        engine(tmp_path, "kv_consumer", **many) as target,
    ):
        handed = [
            output.kv_transfer_params
            for output in answers(source, [with_transfer(GREEDY, ASKED, max_tokens=1)] * len(PROMPTS))
        ]
        assert {params["remote_port"] for params in handed if params is not None} == {port, port + 1}
        for name, sampling in (("g", GREEDY), ("d", DRAWN)):
            got = answers(target, [with_transfer(sampling, params) for params in handed])
            for output, theirs, prompt in zip(got, wanted[name], PROMPTS, strict=True):
                assert output.outputs[0].token_ids == theirs.outputs[0].token_ids
                assert output.num_cached_tokens == (len(prompt) - 1) // 16 * 16
        stats = target.stats()
        assert (stats.kv_fetches, stats.kv_fetch_failures) == (5, 0), "replicas tell what they have"


@pytest.mark.exhaustive  # two workers
def test_ranks_move_the_pages_of_all(tmp_path: Path) -> None:
    """A query group for each rank, and one more for the first one."""
    save_tiny("Llama", tmp_path, num_attention_heads=6, num_key_value_heads=3, hidden_size=96)
    many: dict[str, Any] = {"tensor_parallel_size": 2, **SMALL}
    with engine(tmp_path, "kv_both", **many) as source, engine(tmp_path, "kv_both", **many) as target:
        handed = [
            output.kv_transfer_params
            for output in answers(source, [with_transfer(GREEDY, ASKED, max_tokens=1)] * len(PROMPTS))
        ]
        got = answers(target, [with_transfer(GREEDY, params) for params in handed])
        assert [output.num_cached_tokens for output in got] == [(len(prompt) - 1) // 16 * 16 for prompt in PROMPTS]
        there, here = checksums(source), checksums(target)
        common = there.keys() & here.keys()
        assert len(common) >= 30 and all(there[key] == here[key] for key in common)
        assert target.stats().kv_fetch_failures == 0
        wanted = answers(source, [GREEDY] * len(PROMPTS))
        assert [each.outputs[0].token_ids for each in got] == [each.outputs[0].token_ids for each in wanted]
