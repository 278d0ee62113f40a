"""What tests of clusters on a virtual clock begin with: made up costs, and traffic."""

from __future__ import annotations

from engine.config import EngineConfig
from engine.reports import LoadReport
from entrypoints.bench.cluster.costs import Measured, StepCosts
from entrypoints.bench.cluster.traffic import Arrival, Traffic, arrivals, check

MIB = 1 << 20
REPORT = LoadReport(
    weight_bytes=MIB,
    activation_bytes=MIB,
    workspace_bytes=MIB,
    block_bytes=1024,
    device_bytes_total=1 << 33,
    device_bytes_free=1 << 33,
    attention_backend="virtual",
)


OF = Measured(
    model="tiny",
    dtype="bfloat16",
    quantization="none",
    kv_cache_dtype="bfloat16",
    tensor_parallel_size=1,
    decode_context_parallel_size=1,
    enable_expert_parallel=False,
    threads=1,
)


def costs(token_s: float = 0.001, step_s: float = 0.01, **each: float) -> StepCosts:
    """`step_s`, and `token_s` for each token."""
    return StepCosts(
        source="made up",
        of=OF,
        max_num_batched_tokens=4096,
        knots=[1, 1001],
        at_knots_s=[step_s + token_s, step_s + 1001 * token_s],
        each_s={"sampled": 0.0, "decode_context": 0.0, "prompt_pairs": 0.0, **each},
        error=0.0,
        steps=100,
        report=REPORT,
    )


def given(config: EngineConfig, rate: float, seconds: float = 6.0, seed: int = 0, **changes: int) -> list[Arrival]:
    traffic = Traffic(rate=rate, **{"input_len": 40, "output_len": 8, **changes})
    check(traffic, config.model.max_model_len)
    return arrivals(traffic, seconds, seed, config.model.vocab_size)
