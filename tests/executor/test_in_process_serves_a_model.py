"""The executor with everything real but the weights: description, decoder, attention, sampler."""

from __future__ import annotations

import json
from pathlib import Path

import msgspec
import pytest
from shared_natives import cache_with_natives

from engine.config import CacheConfig, CompileConfig, DeviceConfig, EngineConfig, ModelConfig, SchedulerConfig
from engine.errors import ConfigError
from engine.executor.in_process import InProcessExecutor
from engine.step import NewRow, RowParams, Rows, ScheduledRow, StepPlan, Write, Writes


@pytest.fixture
def config(tmp_path: Path) -> EngineConfig:
    (tmp_path / "config.json").write_text(
        json.dumps(
            {
                "model_type": "llama",
                "architectures": ["LlamaForCausalLM"],
                "vocab_size": 101,
                "hidden_size": 64,
                "intermediate_size": 96,
                "num_hidden_layers": 2,
                "num_attention_heads": 2,
                "num_key_value_heads": 1,
                "max_position_embeddings": 64,
                "rms_norm_eps": 1e-5,
                "hidden_act": "silu",
                "rope_theta": 10000.0,
                "tie_word_embeddings": False,
                "eos_token_id": 2,
            }
        )
    )
    return EngineConfig(
        model=ModelConfig(
            path=str(tmp_path),
            tokenizer=str(tmp_path),
            served_name="tiny",
            dtype="float32",
            max_model_len=64,
            vocab_size=101,
            eos_token_ids=(2,),
            seed=0,
            load_format="dummy",
        ),
        cache=CacheConfig(
            dtype="float32", block_size=16, kv_cache_memory=None, memory_fraction=0.5, enable_prefix_caching=False
        ),
        scheduler=SchedulerConfig(max_num_seqs=2, max_num_batched_tokens=32, max_model_len=64, max_waiting=1),
        compile=CompileConfig(mode="none", graphs="none", cache_dir=str(cache_with_natives(tmp_path / "cache"))),
        device=DeviceConfig(kind="cpu", attention_backend="reference"),
        max_logprobs=0,
    )


@pytest.mark.timeout(120)
def test_steps_submitted_ahead_equal_steps_taken_one_by_one(config: EngineConfig) -> None:
    prompt, outcomes = [5, 6, 7, 8, 9], []
    for ahead in (1, 3):
        executor = InProcessExecutor(config)
        try:
            assert executor.load().attention_backend == "reference"
            executor.allocate(8)
            executor.warm_up()
            new = NewRow(row=1, token_ids=prompt, prompt_len=5, params=RowParams(seed=3))
            plans = [
                StepPlan(
                    step_id=0,
                    added=[new],
                    block_appends=Writes.of([Write(0, 1, 0, [4, 2])]),
                    rows=Rows.of([ScheduledRow(row=1, computed=0, query_len=5, samples=True)]),
                )
            ]
            for n in range(1, 9):
                row = ScheduledRow(row=1, computed=4 + n, query_len=1, samples=True)
                plans.append(StepPlan(step_id=n, rows=Rows.of([row])))
            tokens: list[int] = []
            for first in range(0, 9, ahead):
                batch = plans[first : first + ahead]
                for plan in batch:
                    executor.submit(plan, lambda: None)
                tokens += [token for _ in batch for token in executor.collect().token_ids]
            assert executor.compiles_after_ready() == 0
        finally:
            executor.close()
        outcomes.append(tokens)
    assert len(outcomes[0]) == 9 and outcomes[0] == outcomes[1]


@pytest.mark.timeout(120)
def test_no_fitting_attention_backend_is_a_configuration_error(config: EngineConfig) -> None:
    device = msgspec.structs.replace(config.device, attention_backend="steam")
    executor = InProcessExecutor(msgspec.structs.replace(config, device=device))
    try:
        with pytest.raises(ConfigError, match="'steam' is unknown"):
            executor.load()
    finally:
        executor.close()
