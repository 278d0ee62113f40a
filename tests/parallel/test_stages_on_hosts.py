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

import msgspec
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


@pytest.mark.exhaustive
@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSTOP])
@pytest.mark.parametrize("rank", [1, 2, 3])
@pytest.mark.parametrize("victim", ["worker", "agent"])
def test_whoever_is_killed_or_stopped_ends_all_with_the_cause(
    victim: str, rank: int, number: signal.Signals, tmp_path: Path
) -> None:
    """But a stopped agent: its rank computes on, and it keeps nobody from leaving."""
    save_tiny("Llama", tmp_path)
    args = args_of(tmp_path, tensor_parallel_size=2)
    places, made = AgentProcesses(nodes=BOTH), list[MultiprocExecutor]()
    params = SamplingParams(max_tokens=200, ignore_eos=True)
    few = msgspec.structs.replace(params, max_tokens=8)
    with ExitStack() as held:
        llm = held.enter_context(engine_on(places, args, made))
        llm.generate(prompts(4), few, use_tqdm=False)
        below = [psutil.Process(places.pid(each)) for each in (1, 2, 3)]
        below += [child for agent in below for child in agent.children(recursive=True)]
        assert len(below) == 6 and made[0]._workers is not None
        os.kill(made[0]._workers.pids[rank - 1] if victim == "worker" else places.pid(rank), number)
        if (victim, number) == ("agent", signal.SIGSTOP):
            assert len(llm.generate(prompts(4), few, use_tqdm=False)) == 4
        else:
            words = "was stopped by a signal" if number is signal.SIGSTOP else "died"
            with pytest.raises(EngineError, match=rf"rank {rank} \(process \d+ on 127.0.0.1\) {words}"):
                llm.generate(prompts(4), params, use_tqdm=False)
    deadline = time.monotonic() + 60
    while any(process.is_running() and process.status() != psutil.STATUS_ZOMBIE for process in below):
        assert time.monotonic() < deadline, below
        time.sleep(0.05)
