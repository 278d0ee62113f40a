"""Plans recorded in one process, as bytes, are all that a runner in another one needs for the same results."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import msgspec
import pytest
from tiny_families import save_tiny

from engine import LLM, EngineArgs, SamplingParams, StructuredOutputsParams
from engine.config import EngineConfig
from engine.core.client import InProcessClient
from engine.executor.default import make_executor
from engine.executor.in_process import InProcessExecutor
from engine.executor.interface import Executor
from engine.step import StepMasks, StepPlan, StepResult, decode_masks, decode_plan, encode_step


class Record(msgspec.Struct):
    config: EngineConfig
    blocks: tuple[int, int] = (0, 0)
    """on the device, on the host"""
    plans: list[bytes] = []
    masks: dict[int, bytes] = {}
    """by step"""
    results: list[bytes] = []


def recording(config: EngineConfig, record: Record) -> Executor:
    executor: Any = make_executor(config)
    allocate, submit, collect, sample = executor.allocate, executor.submit, executor.collect, executor.sample

    def noted_allocate(num_blocks: int, num_host_blocks: int = 0) -> None:
        record.blocks = (num_blocks, num_host_blocks)
        allocate(num_blocks, num_host_blocks)

    def noted_submit(plan: StepPlan, done: Any) -> None:
        record.plans.append(encode_step(plan))
        submit(plan, done)

    def noted_sample(masks: StepMasks) -> None:
        record.masks[masks.step_id] = encode_step(masks)
        sample(masks)

    def noted_collect() -> StepResult:
        result: StepResult = collect()
        record.results.append(encode_step(result))
        return result

    executor.allocate, executor.submit = noted_allocate, noted_submit
    executor.collect, executor.sample = noted_collect, noted_sample
    made: InProcessExecutor = executor
    return made


def replay(path: str) -> None:
    """In the other process: what its own runner makes of the plans is written beside them."""
    record = msgspec.msgpack.decode(Path(path).read_bytes(), type=Record)
    executor = make_executor(record.config)
    executor.load()
    executor.allocate(*record.blocks)
    executor.warm_up()
    results = []
    for encoded in record.plans:
        plan = decode_plan(encoded)
        executor.submit(plan, lambda: None)
        if plan.masked:
            executor.sample(decode_masks(record.masks[plan.step_id]))
        results.append(encode_step(executor.collect()))
    executor.close()
    Path(path).write_bytes(msgspec.msgpack.encode(results))


PARAMS = [
    SamplingParams(temperature=0.0, max_tokens=30, ignore_eos=True),
    SamplingParams(temperature=1.0, seed=3, max_tokens=30, n=3, repetition_penalty=1.2, logprobs=2),
    SamplingParams(use_beam_search=True, n=3, max_tokens=20),
    SamplingParams(temperature=0.8, top_p=0.9, seed=5, max_tokens=25, logit_bias={7: 3.0}, prompt_logprobs=1),
    SamplingParams(seed=2, max_tokens=30, n=2, structured_outputs=StructuredOutputsParams(regex="[a-f ]{5,30}")),
]


@pytest.mark.parametrize("ahead", [False, True])
def test_recorded_plans_replay_elsewhere_to_the_same_results(tmp_path: Path, ahead: bool) -> None:
    save_tiny("Llama", tmp_path / "model")
    args = EngineArgs(
        model=str(tmp_path / "model"),
        dtype="float32",
        device="cpu",
        max_model_len=128,
        max_num_seqs=8,
        max_num_batched_tokens=64,
        kv_cache_memory=2 << 17,
        swap_space=4 << 20,
        preemption="swap",
        compile="none",
        async_scheduling=ahead,
    )
    records: list[Record] = []

    def client(config: EngineConfig) -> InProcessClient:
        records.append(Record(config))
        return InProcessClient(config, executor=lambda config: recording(config, records[0]))

    prompts: Any = [{"prompt_token_ids": [5 + (i * j + j) % 90 for j in range(20 + 7 * i)]} for i in range(10)]
    with LLM.from_args(args, client_factory=client) as llm:
        llm.generate(prompts, [PARAMS[i % 5] for i in range(10)], use_tqdm=False)
        stats = llm.stats()
    assert stats.preemptions_swapped > 0, "swapped, copied and rewritten"
    [record] = records
    assert record.masks
    path = tmp_path / "record"
    path.write_bytes(msgspec.msgpack.encode(record))
    call = f"import sys; sys.path[:0] = {sys.path!r}; import test_plans_travel; test_plans_travel.replay({str(path)!r})"
    subprocess.run([sys.executable, "-c", call], check=True)
    replayed = msgspec.msgpack.decode(path.read_bytes(), type=list[bytes])
    # A grammar's end is not foreseen: one step ahead, nobody collects the last step.
    assert replayed[: len(record.results)] == record.results and len(replayed) <= len(record.results) + ahead
