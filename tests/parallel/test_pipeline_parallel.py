"""Engines whose stages are processes answer with the tokens, and the bits, of one process that computes all layers in
the same steps."""

from __future__ import annotations

import functools
import os
import signal
from pathlib import Path
from typing import Any

import msgspec
import pytest
from smollm2 import smollm2_path
from test_tensor_parallel import KINDS, answers, prompts, save_gemma3
from thread_ranks import ThreadRanks
from tiny_families import save_tiny

from attention_backends.toolchain import find_compiler
from engine import LLM, EngineArgs, SamplingParams
from engine.core.in_process_client import InProcessClient
from engine.errors import EngineError
from engine.executor.inline import local_executor
from engine.executor.multiproc import MultiprocExecutor
from engine.executor.worker_handle import WorkerHandle

pytestmark = [
    pytest.mark.skipif(find_compiler() is None, reason="no C++ compiler"),
    pytest.mark.timeout(300),
]


def args_of(path: Path | str, stages: int = 2, **settings: Any) -> EngineArgs:
    given = {"dtype": "float32", "max_model_len": 256, "compile": "none", "threads": 1, **settings}
    return EngineArgs(model=str(path), device="cpu", pipeline_parallel_size=stages, **given)


def engine(args: EngineArgs, *, whole: bool = False) -> LLM:
    """`whole`: all layers in this process, in the steps of the stages; of several parts by threads."""
    local = local_executor if args.tensor_parallel_size == 1 else ThreadRanks
    factory = functools.partial(InProcessClient, executor=local) if whole else None
    return LLM.from_args(args, client_factory=factory)


def greedy(args: EngineArgs, count: int = 64, *, whole: bool = False) -> list[Any]:
    params = SamplingParams(temperature=0.0, max_tokens=16, ignore_eos=True, logprobs=1)
    with engine(args, whole=whole) as llm:
        return answers(llm.generate(prompts(count), params, use_tqdm=False))


@pytest.mark.parametrize(
    "family", ["Gemma3", *(pytest.param(each, marks=pytest.mark.exhaustive) for each in ("Llama", "Qwen3", "Qwen3Moe"))]
)
def test_a_thousand_greedy_tokens_have_the_bits_of_all_layers_in_one_process(family: str, tmp_path: Path) -> None:
    save_gemma3(tmp_path) if family == "Gemma3" else save_tiny(family, tmp_path)
    args = args_of(tmp_path)
    found = greedy(args)
    assert sum(len(tokens) for tokens, _ in found) == 1024
    assert found == greedy(args, whole=True)
    alone = greedy(args_of(tmp_path, stages=1))
    for (tokens, logprobs), (expected, of_expected) in zip(found, alone, strict=True):
        assert tokens == expected
        for step, of_step in zip(logprobs, of_expected, strict=True):
            assert step == pytest.approx(of_step, abs=1e-4)


@pytest.mark.parametrize(
    ("family", "settings"),
    [
        ("Qwen3Moe", {"enable_expert_parallel": True}),
        *(
            pytest.param(*case, marks=pytest.mark.exhaustive)
            for case in (
                ("Gemma3", {}),
                ("Llama", {"stages": 3}),
                ("Qwen3", {"dtype": "bfloat16", "compile": "pieces"}),
                ("Qwen3Moe", {}),
            )
        ),
    ],
)
def test_stages_of_two_parts_have_the_bits_of_all_parts_in_one_process(
    family: str, settings: dict[str, Any], tmp_path: Path
) -> None:
    save_gemma3(tmp_path) if family == "Gemma3" else save_tiny(family, tmp_path)
    args = args_of(tmp_path, **{"tensor_parallel_size": 2, **settings})
    found = greedy(args)
    assert sum(len(tokens) for tokens, _ in found) == 1024
    if args.compile == "none":
        assert found == greedy(args, whole=True)
    else:
        assert found == greedy(msgspec.structs.replace(args, pipeline_parallel_size=1))


@pytest.mark.parametrize(
    ("stages", "quantization", "compile"),
    [
        pytest.param(2, "auto", "none", marks=pytest.mark.exhaustive),
        pytest.param(2, "int8", "none", marks=pytest.mark.exhaustive),
        pytest.param(4, "none", "none", marks=pytest.mark.exhaustive),
        pytest.param(3, "auto", "pieces", marks=pytest.mark.exhaustive),
    ],
)
def test_packed_weights_give_the_bits_of_an_engine_without_stages(stages: int, quantization: str, compile: str) -> None:
    """Whatever steps it takes: packed layers compute the same bits for a row, whoever is beside it."""
    settings = {"dtype": "bfloat16", "quantization": quantization, "compile": compile}
    found = greedy(args_of(smollm2_path(), stages, **settings), 16)
    assert found == greedy(args_of(smollm2_path(), 1, **settings), 16)


def mixed(args: EngineArgs, *, whole: bool = False) -> list[Any]:
    kinds = [KINDS[index % len(KINDS)] for index in range(64)]
    params = [
        SamplingParams(**{"temperature": 0.0, "max_tokens": 24, "seed": index, **kind})
        for index, kind in enumerate(kinds)
    ]
    with engine(args, whole=whole) as llm:
        found = answers(llm.generate(prompts(64), params, use_tqdm=False))
        stats = llm.stats()
    assert stats.preemptions > 0
    assert stats.blocks_swapped_out > 0 or args.preemption != "swap"
    assert stats.drafted_tokens > 0
    return found


@pytest.mark.parametrize(
    ("stages", "parts", "preemption"), [(2, 2, "swap"), pytest.param(3, 1, "recompute", marks=pytest.mark.exhaustive)]
)
def test_a_mixed_workload_gives_the_tokens_of_all_layers_in_one_process(
    stages: int, parts: int, preemption: str, tmp_path: Path
) -> None:
    """Samples, beams, penalties, grammars, drafts and swapping beside each other."""
    save_tiny("Llama", tmp_path)
    args = args_of(
        tmp_path,
        stages,
        tensor_parallel_size=parts,
        dtype="bfloat16",
        max_num_seqs=16,
        max_num_batched_tokens=64,
        kv_cache_memory=16 * 3 * 2 * 2 * 16 * 2 * 40,
        swap_space="64MiB",
        preemption=preemption,
        speculative_config={"method": "ngram", "num_speculative_tokens": 4},
    )
    assert mixed(args) == mixed(args, whole=True)


@pytest.mark.parametrize(
    ("parts", "victim", "what"),
    [
        (1, 1, signal.SIGKILL),
        pytest.param(2, 2, signal.SIGKILL, marks=pytest.mark.exhaustive),
        pytest.param(1, 1, signal.SIGSTOP, marks=pytest.mark.exhaustive),
    ],
)
def test_a_stage_that_is_lost_ends_the_engine_and_all_stages(
    parts: int, victim: int, what: signal.Signals, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Those that are left leave by themselves: the parts of the victim's stage, too, who wait for it alone."""
    save_tiny("Llama", tmp_path)
    executors, killed, kill = list[MultiprocExecutor](), list[int](), WorkerHandle.kill

    def watched(worker: WorkerHandle) -> None:
        killed.append(worker.rank)
        kill(worker)

    monkeypatch.setattr(WorkerHandle, "kill", watched)

    def make(config: Any) -> MultiprocExecutor:
        executors.append(MultiprocExecutor(config))
        return executors[0]

    factory = functools.partial(InProcessClient, executor=make)
    with LLM.from_args(args_of(tmp_path, tensor_parallel_size=parts), client_factory=factory) as llm:
        llm.generate(prompts(4), SamplingParams(max_tokens=2), use_tqdm=False)
        workers = executors[0]._workers
        assert workers is not None
        pids = workers.pids
        os.kill(pids[victim - 1], what)
        with pytest.raises(EngineError, match=rf"rank {victim} .* (died|was stopped)"):
            llm.generate(prompts(4), SamplingParams(max_tokens=200, ignore_eos=True), use_tqdm=False)
    for pid in pids:
        with pytest.raises(ProcessLookupError):
            os.kill(pid, 0)
    assert killed == ([victim] if what == signal.SIGSTOP else [])
