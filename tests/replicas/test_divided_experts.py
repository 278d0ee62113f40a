"""Experts that are divided over replicas, which are real processes: the bits of one process that has all experts, and
what happens when one goes."""

from __future__ import annotations

import json
import logging
import os
import re
import signal
import threading
import time
from dataclasses import replace
from itertools import cycle
from pathlib import Path
from typing import Any

import psutil
import pytest
from chaos import runs, until
from core_fakes import request
from test_tensor_parallel import FIVE, KINDS, SHARED, answers, args_of, prompts, save_tiny

from engine import LLM, EngineArgs, SamplingParams
from engine.config import EngineConfig
from engine.errors import ConfigError, CoreDiedError
from engine.models.placement import ExpertPlacement, write_placement
from engine.replicas.client import ReplicatedClient
from engine.resolve import resolve_here

pytestmark = pytest.mark.timeout(300)

GREEDY = SamplingParams(temperature=0.0, max_tokens=16, ignore_eos=True, logprobs=1)


MOVING: dict[str, Any] = {"enable_eplb": True, "eplb_config": {"window_size": 2, "step_interval": 3}}
"""all the time"""


def divided(args: EngineArgs, replicas: int = 2, **settings: Any) -> EngineArgs:
    return replace(args, data_parallel_size=replicas, enable_expert_parallel=True, **settings)


def generated(args: EngineArgs, params: Any, count: int = 64) -> list[Any]:
    with LLM.from_args(args) as llm:
        return answers(llm.generate(prompts(count), params, use_tqdm=False))


CASES: tuple[tuple[str, dict[str, Any], dict[str, Any]], ...] = (
    ("Qwen3Moe", FIVE, {}),
    ("Qwen2Moe", SHARED, {"quantization": "int8"}),
    ("Qwen2Moe", SHARED, {"async_scheduling": True}),
    ("Qwen3Moe", FIVE, {"replicas": 3}),
    ("GptOss", {"num_local_experts": 5}, {}),
    ("GptOss", {"num_local_experts": 5}, MOVING),
    ("Qwen3Moe", FIVE, {"replicas": 3, "quantization": "int8", **MOVING}),
)


@pytest.mark.exhaustive
@pytest.mark.parametrize(("family", "changes", "settings"), CASES)
def test_a_thousand_greedy_tokens_have_the_bits_of_one_process(
    family: str, changes: dict[str, Any], settings: dict[str, Any], tmp_path: Path
) -> None:
    save_tiny(family, tmp_path, **changes)
    moving = {name: settings[name] for name in settings if name in MOVING}
    settings = {name: settings[name] for name in settings if name not in MOVING}
    size = settings.pop("replicas", 2)
    args = args_of(tmp_path, ranks=1, dtype="bfloat16", **settings)
    found = generated(divided(args, size, **moving), GREEDY)
    assert sum(len(tokens) for tokens, _ in found) == 1024
    assert found == generated(args, GREEDY)


def test_replicas_with_divided_experts(
    tmp_path: Path, capfd: pytest.CaptureFixture[str], caplog: pytest.LogCaptureFixture
) -> None:
    """One start for all that follows: bits while experts move, loads, idle ones that sleep, what is refused; then one
    is killed."""
    caplog.set_level(logging.INFO)
    save_tiny("Qwen2Moe", tmp_path, **SHARED)
    args = args_of(tmp_path, ranks=1, dtype="bfloat16")
    made: list[ReplicatedClient] = []

    def factory(config: EngineConfig) -> ReplicatedClient:
        made.append(ReplicatedClient(config))
        return made[-1]

    with LLM.from_args(divided(args, **MOVING), client_factory=factory) as llm:
        found = answers(llm.generate(prompts(64), GREEDY, use_tqdm=False))
        assert sum(len(tokens) for tokens, _ in found) == 1024
        assert found == generated(args, GREEDY)
        stats = llm.stats()
        assert stats.experts_moved >= 10 and stats.expert_tokens > 0
        each = made[0].stats_of_each()
        assert sum(stats.expert_tokens for stats in each.values()) == stats.expert_tokens
        processes = [psutil.Process(replica.client.pid) for replica in made[0]._fleet.replicas]
        time.sleep(0.2)
        used = [sum(each.cpu_times()[:2]) for each in processes]
        time.sleep(0.5)
        assert all(sum(each.cpu_times()[:2]) - was < 0.2 for each, was in zip(processes, used, strict=True))
        changes = (made[0].add_replica, lambda: made[0].remove_replica(0), lambda: made[0].scale(3))
        for change in changes:
            with pytest.raises(ConfigError, match="none comes or goes"):
                change()
        processes[1].send_signal(signal.SIGTERM)  # as a shutdown does
        with pytest.raises(CoreDiedError, match=r"replica 1 has been closed|SIGTERM ends a core"):
            llm.generate(prompts(64), GREEDY, use_tqdm=False)
        until(lambda: not any(map(runs, processes)))
    given = 2 * (sum(len(prompt["prompt_token_ids"]) for prompt in prompts(64)) + 64 * 15)
    loads = re.findall("expert loads of replica 1: (.*)", capfd.readouterr().err)
    assert len(loads) == 1 and [sum(layer) for layer in json.loads(loads[0])] != [0] * 3
    assert all(0 < sum(layer) <= 2 * given for layer in json.loads(loads[0]))


@pytest.mark.exhaustive
def test_a_mixed_workload_gives_the_tokens_of_one_process(tmp_path: Path) -> None:
    """Samples, beams, penalties, grammars, drafts and swapping beside each other, with experts anywhere."""
    save_tiny("Qwen2Moe", tmp_path, **SHARED)
    args = args_of(
        tmp_path,
        ranks=1,
        dtype="bfloat16",
        max_num_seqs=16,
        max_num_batched_tokens=64,
        kv_cache_memory=16 * 3 * 2 * 2 * 16 * 2 * 40,
        swap_space="64MiB",
        preemption="swap",
        speculative_config={"method": "ngram", "num_speculative_tokens": 4},
    )
    params = [
        SamplingParams(**{"temperature": 0.0, "max_tokens": 24, "seed": index, **kind})
        for index, kind in zip(range(64), cycle(KINDS))
    ]
    placement = ExpertPlacement(((1, 0, 0, 1, 0),) * 3)
    file = tmp_path / "placement.json"
    write_placement(placement, str(file))
    found = generated(replace(divided(args), expert_placement=str(file)), params)
    assert found == generated(args, params)


@pytest.mark.exhaustive
def test_compiled_replicas_bring_the_same_bits(tmp_path: Path) -> None:
    """One that has its pieces already beside one that has not, and then both."""
    save_tiny("Qwen2Moe", tmp_path, **SHARED)
    args = args_of(tmp_path, ranks=1, dtype="bfloat16")
    expected = generated(args, GREEDY)
    with LLM.from_args(replace(divided(args, **MOVING), compile="pieces")) as llm:
        while True:
            was_compiling = llm.stats().compiling
            assert answers(llm.generate(prompts(64), GREEDY, use_tqdm=False)) == expected
            if not was_compiling:
                break
        assert not llm.stats().compile_failed


class Running:
    """Two replicas with requests that do not end, and who receives."""

    def __init__(self, path: Path) -> None:
        save_tiny("Qwen3Moe", path, **FIVE)
        args = divided(args_of(path, ranks=1, dtype="bfloat16", max_model_len=1024), **MOVING)
        config = resolve_here(args)[1]
        self.client = ReplicatedClient(config)
        self.client.start()
        self.pids = [replica.client.pid for replica in self.client._fleet.replicas]
        self.outputs = 0
        self.died: str | None = None
        self._thread = threading.Thread(target=self._receive, daemon=True)
        self._thread.start()

    def send(self, count: int = 4, max_tokens: int = 1000) -> None:
        for index in range(count):
            self.client.send(request(f"r{index}", max_tokens=max_tokens, prompt_len=10 + index))

    def _receive(self) -> None:
        try:
            while True:
                self.client.recv()
                self.outputs += 1
        except CoreDiedError as error:
            self.died = str(error)

    def close(self) -> None:
        self.client.close()
        self._thread.join(30)
        assert not any(psutil.pid_exists(pid) for pid in self.pids)


@pytest.mark.exhaustive
@pytest.mark.parametrize("busy", [False, True])
@pytest.mark.parametrize("signum", [signal.SIGKILL, signal.SIGSTOP])
def test_a_replica_that_goes_ends_all_with_its_cause(signum: signal.Signals, busy: bool, tmp_path: Path) -> None:
    before = set(os.listdir("/dev/shm"))
    running = Running(tmp_path)
    try:
        if busy:
            running.send()
            until(lambda: running.outputs > 10)
        os.kill(running.pids[1], signum)
        if not busy and signum == signal.SIGSTOP:
            running.send()
        until(lambda: running.died is not None)
        assert running.died is not None
        assert "SIGKILL" in running.died.splitlines()[-1] or "stopped by a signal" in running.died.splitlines()[-1]
        until(lambda: not any(runs(each) for each in map(process_of, running.pids) if each is not None))
    finally:
        running.close()
    assert set(os.listdir("/dev/shm")) <= before


def process_of(pid: int) -> psutil.Process | None:
    try:
        return psutil.Process(pid)
    except psutil.NoSuchProcess:
        return None
