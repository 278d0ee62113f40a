"""Collectives through torch's process groups, between real processes, against plain torch in the order of ranks."""

from __future__ import annotations

import functools
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from gloo_group import gloo_group
from rank_cases import draw_case, hash_of
from rank_processes import Workers
from tiny_families import save_tiny

from attention_backends.toolchain import find_compiler
from engine import LLM, EngineArgs, SamplingParams
from engine.core.in_process_client import InProcessClient
from engine.executor.multiproc import MultiprocExecutor
from engine.executor.ranks import Parts
from engine.parallel.device_group import WHOLE_BYTES, DeviceGroup, allocate


@pytest.fixture(scope="module")
def workers(native_cache: Path) -> Iterator[Workers]:
    made = Workers(native_cache, "gloo_group:gloo_group", allocate)
    yield made
    made.end()


@pytest.mark.parametrize("size", [2, 3])
def test_every_rank_gets_the_bits_of_plain_torch(workers: Workers, size: int) -> None:
    """Tensors that go whole to every rank, and those that are divided."""
    first, count, most_rows, most_columns = 3000 * size, 40, 64, 1000
    cases = [draw_case(seed, size, most_rows, most_columns) for seed in range(first, first + count)]
    sizes = [case.rows * case.columns[0] * case.x_dtype.itemsize for case in cases if not case.gathers]
    assert min(sizes) < WHOLE_BYTES < max(sizes)
    expected = [hash_of(case.expected()) for case in cases]
    ranks = workers.group(size)
    assert ranks.all("run_cases", first, count, most_rows, most_columns) == [expected] * size


def test_a_function_compiled_once_calls_the_same_collectives_for_any_number_of_rows(workers: Workers) -> None:
    ranks = workers.group(2)
    rows, columns = [3, 7, 200, 2], [4, 3]
    got = ranks.all("compute_both", rows, columns, True)
    for at, count in enumerate(rows):
        x = torch.arange(count * 4, dtype=torch.float32).view(count, 4)
        doubled = (x + (x + 1)).to(torch.bfloat16) * 2
        expected = hash_of(torch.cat([doubled, doubled[:, :3]], dim=1))
        assert [of_rank[at] for of_rank in got] == [expected] * 2


def test_a_rank_whose_peer_has_gone_does_not_wait(workers: Workers) -> None:
    ranks = workers.group(2)
    ranks.all("reduce", 1, 8, torch.float32)
    waiting, killed = ranks.processes
    waiting.send("reduce", 1, 8, torch.float32)
    killed.process.kill()
    with pytest.raises(RuntimeError):
        waiting.result()


@pytest.fixture
def alone(tmp_path: Path) -> Iterator[DeviceGroup]:
    fd = allocate(1, 100)
    group = gloo_group(fd, "alone", 0, 1, tmp_path)
    os.close(fd)
    yield group
    group.close()


def test_alone_nobody_is_met_and_once_stopped_nobody_is_waited_for(alone: DeviceGroup) -> None:
    x = torch.ones(2, 3)
    with alone.alone():
        assert torch.equal(
            alone.all_reduce(x, None, torch.bfloat16, alone.name), torch.zeros(2, 3, dtype=torch.bfloat16)
        )
    assert torch.equal(alone.all_gather(x, [3], alone.name), x)
    alone.abort("rank 1 ended by signal 9")
    alone.abort("a second reason")
    with pytest.raises(RuntimeError, match=r"^rank 1 ended by signal 9$"):
        alone.all_reduce(x, None, torch.float32, alone.name)


def test_a_second_group_of_a_name_has_a_number_and_a_closed_one_is_not_found(
    alone: DeviceGroup, tmp_path: Path
) -> None:
    fd = allocate(1, 100)
    second = gloo_group(fd, "alone", 0, 1, tmp_path)
    os.close(fd)
    assert (alone.name, second.name) == ("alone", "alone-2")
    second.close()
    second.close()
    with pytest.raises(RuntimeError, match="no group 'alone-2'"):
        alone.all_reduce(torch.ones(1, 1), None, torch.float32, "alone-2")


def test_the_kernel_for_gpus_has_the_bits_of_plain_torch() -> None:
    pytest.importorskip("triton")
    environment = {**os.environ, "TRITON_INTERPRET": "1", "PYTHONPATH": os.pathsep.join(sys.path)}
    script = Path(__file__).with_name("interpret_sum.py")
    done = subprocess.run([sys.executable, str(script)], env=environment, capture_output=True, text=True, timeout=200)
    assert done.returncode == 0 and "same bits" in done.stdout, done.stderr


@pytest.mark.skipif(find_compiler() is None, reason="no C++ compiler")
def test_an_engine_whose_ranks_exchange_so_answers_with_the_same_bits(tmp_path: Path) -> None:
    save_tiny("Qwen3", tmp_path)
    parts = Parts(allocate="engine.parallel.device_group:allocate", make_group="gloo_group:gloo_group")
    found = []
    for executor in (MultiprocExecutor, lambda config: MultiprocExecutor(config, parts)):
        args = EngineArgs(
            model=str(tmp_path),
            device="cpu",
            dtype="float32",
            max_model_len=128,
            compile="none",
            threads=1,
            tensor_parallel_size=2,
        )
        params = SamplingParams(temperature=0.0, max_tokens=16, ignore_eos=True, logprobs=1)
        prompts = [{"prompt_token_ids": [3 + (7 * i + j) % 250 for j in range(5 + 9 * i)]} for i in range(6)]
        with LLM.from_args(args, client_factory=functools.partial(InProcessClient, executor=executor)) as llm:
            outputs = llm.generate(prompts, params, use_tqdm=False)
        found.append([(each.outputs[0].token_ids, each.outputs[0].logprobs) for each in outputs])
    assert found[0] == found[1]


@pytest.mark.gpu
def test_two_gpus_give_the_bits_of_plain_torch(tmp_path: Path) -> None:
    if torch.cuda.device_count() < 2:
        pytest.skip("needs two GPUs")
    workers = Workers(tmp_path, "on_gpus:nccl_group", allocate)
    try:
        cases = [draw_case(seed, 2, 64, 1000) for seed in range(40)]
        expected = [hash_of(case.expected()) for case in cases]
        assert workers.group(2).all("run_cases", 0, 40, 64, 1000) == [expected] * 2
    finally:
        workers.end()
