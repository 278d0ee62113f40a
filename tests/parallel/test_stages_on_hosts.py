"""Stages whose ranks run behind agents, as on other hosts: the bits of one process, whatever their nodes share; and a
rank that is lost ends all."""

from __future__ import annotations

import functools
import os
import signal
import time
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import psutil
import pytest
from agent_processes import AgentProcesses
from test_pipeline_parallel import args_of, greedy
from test_tensor_parallel import answers, prompts, save_gemma3
from tiny_families import save_tiny

from attention_backends.toolchain import find_compiler
from engine import LLM, EngineArgs, SamplingParams
from engine.config import EngineConfig
from engine.core.in_process_client import InProcessClient
from engine.errors import EngineError
from engine.executor.multiproc import MultiprocExecutor
from engine.executor.ranks import Parts
from engine.executor.remote_ranks import Places, RemoteRanks

pytestmark = [
    pytest.mark.skipif(find_compiler() is None, reason="no C++ compiler"),
    pytest.mark.timeout(300),
]
BOTH = ["here", "here", "there", "there"]
"""a stage on each of two nodes"""


def engine_on(places: Places, args: EngineArgs, made: list[MultiprocExecutor] | None = None) -> LLM:
    def make_ranks(config: EngineConfig, parts: Parts) -> RemoteRanks:
        return RemoteRanks(config, parts, places)

    def executor(config: EngineConfig) -> MultiprocExecutor:
        executor = MultiprocExecutor(config, make_ranks=make_ranks)
        if made is not None:
            made.append(executor)
        return executor

    return LLM.from_args(args, client_factory=functools.partial(InProcessClient, executor=executor))


def greedy_on(places: Places, args: EngineArgs, count: int) -> list[Any]:
    params = SamplingParams(temperature=0.0, max_tokens=16, ignore_eos=True, logprobs=1)
    with engine_on(places, args) as llm:
        return answers(llm.generate(prompts(count), params, use_tqdm=False))


@pytest.mark.parametrize(
    ("family", "stages", "parts", "nodes", "count"),
    [
        ("Llama", 2, 1, ["here", "there"], 16),
        *(
            pytest.param(*case, 64, marks=pytest.mark.exhaustive)
            for case in (
                ("Gemma3", 2, 1, ["here", "there"]),
                ("Qwen3Moe", 3, 1, ["a", "b", "c"]),
                ("Llama", 2, 2, BOTH),
                ("Qwen3Moe", 2, 2, ["a", "b", "a", "b"]),
                ("Qwen3", 2, 2, ["a", "a", "b", "c"]),
                ("Llama", 2, 2, ["here"] * 4),
            )
        ),
    ],
)
def test_stages_behind_agents_have_the_bits_of_one_process(
    family: str, stages: int, parts: int, nodes: Sequence[str], count: int, tmp_path: Path
) -> None:
    """1,024 tokens where it is exhaustive. Parts of a stage share memory or have streams, by their nodes."""
    save_gemma3(tmp_path) if family == "Gemma3" else save_tiny(family, tmp_path)
    args = args_of(tmp_path, stages, tensor_parallel_size=parts)
    assert greedy_on(AgentProcesses(nodes=nodes), args, count) == greedy(args, count, whole=True)
