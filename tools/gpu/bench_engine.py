"""The whole engine on random weights of a known shape: a decode step against what reading its bytes must cost, the
host's share of it, and throughput through `LLM.generate`."""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import Literal

from engine import SamplingParams
from engine.config import EngineArgs, GraphMode
from gpu.backends import Backends
from gpu.ceilings import copy_gb_per_s, matmul_tflop_per_s
from gpu.context import Context
from gpu.engine_probe import Probe, open_probe, steady_figures
from gpu.models import read_config, shape_directory
from gpu.workloads import Workload, mixed, uniform

BATCHES = {1: 128, 256: 512, 64: 512, 8: 512}
"""sequences → tokens of context at their first step"""
CAPTURE_LIMIT_S = 45.0
DRY_BATCHES = {1: 8, 3: 20}


@dataclass(frozen=True)
class Variant:
    """One load of a model and what is measured with it."""

    shape: Literal["qwen3-0.6b", "qwen3-8b", "qwen3.5-0.8b"]
    graphs: GraphMode
    backend: str = "cuda"
    throughput: bool = True

    @property
    def label(self) -> dict[str, object]:
        return {"shape": self.shape, "graphs": self.graphs, "backend": self.backend}


VARIANTS: dict[str, Variant] = {
    "engine-8b-full": Variant("qwen3-8b", "both"),
    "engine-8b-piecewise": Variant("qwen3-8b", "piecewise", throughput=False),
    "engine-0.6b-full": Variant("qwen3-0.6b", "both"),
    "engine-0.6b-none": Variant("qwen3-0.6b", "none"),
    "engine-0.6b-piecewise": Variant("qwen3-0.6b", "piecewise"),
    "engine-0.6b-flashinfer": Variant("qwen3-0.6b", "both", "flashinfer"),
    "engine-hybrid": Variant("qwen3.5-0.8b", "piecewise"),
    "engine-8b-none": Variant("qwen3-8b", "none"),
    "engine-8b-flashinfer": Variant("qwen3-8b", "both", "flashinfer"),
    "engine-8b-piecewise-throughput": Variant("qwen3-8b", "piecewise"),
}
"""part → what it measures, most important first"""


def run(context: Context, variant: Variant) -> None:
    """One load: decode steps at every batch, then throughput."""
    Backends(context, variant.backend)  # where there is none, that is known before a model is loaded
    copy = copy_gb_per_s(context.device)
    context.device.release_memory()
    model = shape_directory(variant.shape, context.scratch, context.dry)
    started = time.perf_counter()
    probe = open_probe(engine_args(context, variant, str(model)))
    try:
        runner, warm = probe.client.runner, probe.client.runner.warm_up_report
        ready_s = round(time.perf_counter() - started, 1)
        probe.client.wait_compiled()
        context.check("pieces are compiled", probe.client.compile_problem())
        report = runner.compile_report()
        if not runner.wait_captured(min(CAPTURE_LIMIT_S, context.left_s() / 2)):
            context.skipped("some graphs", "their capture took too long; steps of those sizes ran without")
        context.figure(
            "start",
            variant.label
            | runner.graphs()
            | {
                "ready_s": ready_s,
                "all_captured_s": round(time.perf_counter() - started, 1),
                "warm_up_s": round(warm.seconds, 1),
                "pieces": report.distinct_pieces,
                "pieces_compiled": report.compiled,
                "attention_backend": probe.llm.ready.attention_backend,
                "copy_gb_per_s": round(copy, 1),
            },
        )
        decode_steps(context, variant, probe, copy)
        if variant.throughput:
            throughput(context, variant, probe, copy)
        context.check("nothing compiled after ready", _late_compiles(probe))
    finally:
        probe.close()


def engine_args(context: Context, variant: Variant, model: str) -> EngineArgs:
    if context.dry:
        return EngineArgs(
            model=model,
            dtype="bfloat16",
            device="cuda",
            max_model_len=512,
            max_num_seqs=8,
            max_num_batched_tokens=64,
            kv_cache_memory=8 << 20,
            graphs=variant.graphs,
            attention_backend=variant.backend,
            load_format="dummy",
            cache_dir=str(context.cache_dir),
        )
    return EngineArgs(
        model=model,
        dtype="bfloat16",
        device="cuda",
        max_model_len=4096,
        max_num_seqs=256,
        max_num_batched_tokens=8192,
        compile="pieces",
        graphs=variant.graphs,
        attention_backend=variant.backend,
        load_format="dummy",
        cache_dir=str(context.cache_dir),
    )


def _sizes(context: Context, variant: Variant, probe: Probe) -> tuple[int, int]:
    """Numbers of the weights that every step reads, and bytes of a token's keys and values."""
    config, width = read_config(context.scratch / variant.shape), 2
    embedding = 0 if config["tie_word_embeddings"] else config["vocab_size"] * config["hidden_size"]
    attending = config.get("layer_types", ["full_attention"] * config["num_hidden_layers"]).count("full_attention")
    token = 2 * width * attending * config["num_key_value_heads"] * config["head_dim"]
    return probe.client.runner.report.weight_bytes // width - embedding, token


def _state_bytes(context: Context, variant: Variant) -> int:
    """Of a sequence's matrices, which a step reads and writes."""
    config = read_config(context.scratch / variant.shape)
    layers = config.get("layer_types", []).count("linear_attention")
    if not layers:
        return 0
    return int(
        4 * layers * config["linear_num_value_heads"] * config["linear_key_head_dim"] * config["linear_value_head_dim"]
    )


def decode_steps(context: Context, variant: Variant, probe: Probe, copy_gb: float) -> None:
    vocab = read_config(context.scratch / variant.shape)["vocab_size"]
    numbers, token = _sizes(context, variant, probe)
    weights = 2 * numbers
    for batch, prompt_len in (DRY_BATCHES if context.dry else BATCHES).items():
        if context.out_of_time(f"decode step at batch {batch}", 8.0):
            continue
        row = steady_figures(context, probe, batch, prompt_len, vocab)
        row |= {"weights_floor_ms": round(weights / copy_gb / 1e6, 4)}
        read = weights + batch * (token * int(str(row["context"])) + 2 * _state_bytes(context, variant))
        row |= {"floor_ms": round(read / copy_gb / 1e6, 4)}
        row |= {"over_weights_floor": round(float(str(row["step_ms"])) / (weights / copy_gb / 1e6), 4)}
        row |= {"over_floor": round(float(str(row["step_ms"])) / (read / copy_gb / 1e6), 4)}
        context.figure("decode_step", variant.label | row)


def workload_of(context: Context, variant: Variant) -> Workload:
    if context.dry:
        return mixed(6, 3, 20, 500) if variant.shape == "qwen3-0.6b" else uniform(6, 12, 9, 500)
    return uniform(256, 1024, 1024) if variant.shape == "qwen3-8b" else mixed(256)


def _floor_s(context: Context, variant: Variant, probe: Probe, workload: Workload, copy_gb: float) -> float:
    """What the workload must take: prompts two operations for each of their tokens and numbers of the linear layers, at
    the rate of a matrix product; answers in as few steps as the longest needs, each of which reads the weights, and the
    KV of its sequences."""
    numbers, token_bytes = _sizes(context, variant, probe)
    prompts = 2 * numbers * workload.prompt_tokens / (matmul_tflop_per_s(context.device) * 1e12)
    steps = max(workload.output_lens)
    read = steps * 2 * numbers + 2 * _state_bytes(context, variant) * workload.output_tokens
    for prompt, length in zip(workload.prompts, workload.output_lens, strict=True):
        read += token_bytes * (len(prompt) * length + length * (length + 1) // 2)
    return prompts + read / (copy_gb * 1e9)


def throughput(context: Context, variant: Variant, probe: Probe, copy_gb: float) -> None:
    workload = workload_of(context, variant)
    if context.out_of_time(f"throughput {workload.name}", 5.0 if context.dry else 30.0):
        return
    warm = SamplingParams(temperature=0.6, max_tokens=8, ignore_eos=True, detokenize=False)
    probe.llm.generate([{"prompt_token_ids": [i + 5, 9, 11]} for i in range(4)], warm, use_tqdm=False)
    params = [
        SamplingParams(temperature=0.6, seed=i, max_tokens=length, ignore_eos=True, detokenize=False)
        for i, length in enumerate(workload.output_lens)
    ]
    context.device.synchronize()
    started = time.perf_counter()
    outputs = probe.llm.generate([{"prompt_token_ids": p} for p in workload.prompts], params, use_tqdm=False)
    seconds = time.perf_counter() - started
    lengths = [len(output.outputs[0].token_ids) for output in outputs]
    wrong = sum(a != b for a, b in zip(lengths, workload.output_lens, strict=True))
    context.check("every sequence has its length", f"{wrong} differ" if wrong else None)
    row = {"workload": workload.name, "prompt_tokens": workload.prompt_tokens, "output_tokens": sum(lengths)}
    row |= {"seconds": round(seconds, 3), "output_tokens_per_s": round(sum(lengths) / seconds, 1)}
    row |= {"total_tokens_per_s": round((sum(lengths) + workload.prompt_tokens) / seconds, 1)}
    floor = _floor_s(context, variant, probe, workload, copy_gb)
    row |= {"preemptions": probe.llm.stats().preemptions, "floor_s": round(floor, 2)}
    row |= {"over_floor": round(seconds / floor, 4)}
    context.figure("throughput", variant.label | row)


def warmed() -> list[Variant]:
    """One of `VARIANTS` for each set of pieces: attention is in none of them, but the choice of linear kernels is,
    which is made for models that run from graphs."""
    sets: dict[tuple[str, bool], Variant] = {}
    for variant in VARIANTS.values():
        sets.setdefault((variant.shape, variant.graphs != "none"), variant)
    return list(sets.values())


def warm_pieces(context: Context) -> None:
    """Part `compile-pieces`: fill the cache that the benchmarks start from, with what exactly they will run."""
    for variant in warmed():
        if context.dry and variant.shape != "qwen3-0.6b":
            context.skipped(f"pieces of {variant.shape}", "a dry run's shapes are one toy")
            continue
        if context.out_of_time(f"pieces of {variant.shape}, graphs {variant.graphs}", 20.0):
            continue
        model = shape_directory(variant.shape, context.scratch, context.dry)
        started = time.perf_counter()
        probe = open_probe(engine_args(context, variant, str(model)))
        try:
            probe.client.wait_compiled()
            seconds, report = round(time.perf_counter() - started, 1), probe.client.runner.compile_report()
            row: dict[str, object] = {"shape": variant.shape, "graphs": variant.graphs, "seconds": seconds}
            context.figure("pieces", row | {"distinct": report.distinct_pieces, "compiled": report.compiled})
            context.check(f"pieces of {variant.shape}, graphs {variant.graphs}", probe.client.compile_problem())
        finally:
            probe.close()
        context.device.release_memory()


def _late_compiles(probe: Probe) -> str | None:
    late = probe.client.runner.compiles_after_ready()
    return f"{late} compilations while serving" if late else None
