"""`engine-bench latency` and `throughput`: the engine in this process, no HTTP."""

from __future__ import annotations

import argparse
import time
from statistics import median
from typing import TYPE_CHECKING

from entrypoints.bench.metrics import Figures, Record, figures, median_of, table
from entrypoints.bench.workloads import WARM_UP_REPEAT, WARM_UP_SEED, BenchRequest, random_workload, workload

if TYPE_CHECKING:
    from engine import LLM
    from engine.request import RequestOutput, StructuredOutputsParams


def run_once(
    llm: LLM, requests: list[BenchRequest], *, progress: bool, structured: StructuredOutputsParams | None = None
) -> Figures:
    """All requests at once, greedy, output lengths exact, unless what is asked for ends before."""
    return figures(*run_records(llm, requests, progress=progress, structured=structured))


def run_records(
    llm: LLM, requests: list[BenchRequest], *, progress: bool, structured: StructuredOutputsParams | None = None
) -> tuple[list[Record], float, float]:
    """The same as one record a request, and when the run began and ended."""
    from engine import SamplingParams

    def wanted(request: BenchRequest) -> SamplingParams:
        return SamplingParams(
            temperature=0.0,
            max_tokens=request.max_tokens,
            ignore_eos=True,
            detokenize=False,
            use_beam_search=request.beams > 0,
            best_of=request.beams or None,
            structured_outputs=structured,
        )

    params = [wanted(request) for request in requests]
    prompts = [{"prompt_token_ids": r.prompt_token_ids} for r in requests]
    start = time.monotonic()
    outputs = llm.generate(prompts, params, use_tqdm=progress)
    end = time.monotonic()
    return [_record(o, r) for o, r in zip(outputs, requests)], start, end


def _record(output: RequestOutput, request: BenchRequest) -> Record:
    assert output.metrics is not None and output.metrics.finished_time is not None
    return Record(
        submitted=output.metrics.arrival_time,
        first_token=output.metrics.first_token_time,
        finished=output.metrics.finished_time,
        input_tokens=len(output.prompt_token_ids),
        output_tokens=len(output.outputs[0].token_ids),
        wanted_tokens=request.max_tokens,
    )


def throughput(llm: LLM, options: argparse.Namespace) -> list[dict[str, object]]:
    """Each named workload, or one random one: the median over the repeats after a warm-up."""
    results: list[dict[str, object]] = []
    warm_up = workload("WARM", WARM_UP_REPEAT) if options.workload else _random(llm, options, -1)[:4]
    run_once(llm, warm_up, progress=False, structured=options.structured_outputs)
    for name in options.workload or ["random"]:
        runs, constrained = [], []
        if name in ("W1", "W5"):
            run_once(llm, workload(name, WARM_UP_REPEAT), progress=False)
        for repeat in range(options.reps):
            requests = workload(name, repeat) if options.workload else _random(llm, options, repeat)
            runs.append(run_once(llm, requests, progress=options.progress))
            if (asked := options.structured_outputs) is not None:
                llm.reset_prefix_cache()  # the same prompts, computed again
                constrained.append(run_once(llm, requests, progress=options.progress, structured=asked))
        result = median_of(runs)
        print(table(f"Throughput, {name}", result), flush=True)
        results.append({"workload": name, "mode": "offline", **result})
        if constrained:
            ratio = median(_rate(one) / _rate(free) for one, free in zip(constrained, runs, strict=True))
            result = median_of(constrained)
            print(table(f"Throughput, {name}, structured outputs: {ratio:.3f} of the free one", result), flush=True)
            results.append({"workload": name, "mode": "structured", "over_free": ratio, **result})
    return results


def _rate(one: Figures) -> float:
    return float(one["output_tokens_per_s"])


def _random(llm: LLM, options: argparse.Namespace, repeat: int) -> list[BenchRequest]:
    vocab = llm.model_config.vocab_size
    return random_workload(
        options.num_prompts,
        options.input_len,
        options.output_len,
        None,
        vocab,
        llm.config.model.seed + repeat if repeat >= 0 else WARM_UP_SEED,
        options.range_ratio,
    )


def latency(llm: LLM, options: argparse.Namespace) -> list[dict[str, object]]:
    """One batch of equal requests, from submission to its last token."""
    import numpy as np
    from tqdm import tqdm

    def once(seed: int) -> float:
        vocab = llm.model_config.vocab_size
        requests = random_workload(options.batch_size, options.input_len, options.output_len, None, vocab, seed)
        return float(run_once(llm, requests, progress=False)["wall_s"])

    for i in tqdm(range(options.warmup), desc="Warm-up", disable=not options.progress):
        once(WARM_UP_SEED + i)
    rounds = tqdm(range(options.reps), desc="Latency", disable=not options.progress)
    seconds = np.array([once(llm.config.model.seed + i) for i in rounds])
    result: dict[str, object] = {
        "workload": f"batch {options.batch_size}, {options.input_len} in / {options.output_len} out",
        "mode": "latency",
        "avg_latency_s": float(seconds.mean()),
        "repeats": len(seconds),
    }
    print(f"Avg latency: {seconds.mean():.4f} s")
    for q in (10, 25, 50, 75, 90, 99):
        result[f"p{q}_latency_s"] = float(np.percentile(seconds, q))
        print(f"{q}% percentile latency: {result[f'p{q}_latency_s']:.4f} s")
    return [result]
