"""Stages beside one process: tokens per second of a batch that decodes and of prompts, in alternation.

`hop_ms` is what one row's token takes longer for each stage, for `engine-bench cluster`.

Each engine is alone while it is measured, because cores are given to those that run, and the better of two runs behind
a first one counts. It computes with ``--threads`` threads a stage. Prints JSON as the last line. Usage:
``python tools/bench_stages.py MODEL [--stages 2] [--pairs 3]``.
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
import time
from typing import Any

from engine import LLM, SamplingParams


def prompts(count: int, length: int, seed: int) -> list[dict[str, list[int]]]:
    rng = random.Random(seed)
    return [{"prompt_token_ids": [rng.randrange(100, 20000) for _ in range(length)]} for _ in range(count)]


def rates(llm: LLM, rows: int, tokens: int, prompt: int, round_: int) -> tuple[float, ...]:
    """Tokens per second of rows that decode, of four prompts, of one prompt alone, and of one row that decodes."""
    given = prompts(rows, 16, 2 * round_)
    began = time.perf_counter()
    llm.generate(given, SamplingParams(temperature=0.0, max_tokens=tokens, ignore_eos=True), use_tqdm=False)
    decoded = rows * tokens / (time.perf_counter() - began)
    first = SamplingParams(temperature=0.0, max_tokens=1)
    given = prompts(4, prompt, 2 * round_ + 1)
    began = time.perf_counter()
    llm.generate(given, first, use_tqdm=False)
    read = 4 * prompt / (time.perf_counter() - began)
    began = time.perf_counter()
    llm.generate(prompts(1, prompt, 1000 + round_), first, use_tqdm=False)
    alone = prompt / (time.perf_counter() - began)
    began = time.perf_counter()
    one = prompts(1, 16, 2000 + round_)
    llm.generate(one, SamplingParams(temperature=0.0, max_tokens=4 * tokens, ignore_eos=True), use_tqdm=False)
    return decoded, read, alone, 4 * tokens / (time.perf_counter() - began)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0] if __doc__ else None)
    parser.add_argument("model")
    parser.add_argument("--stages", type=int, default=2)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--rows", type=int, default=64)
    parser.add_argument("--tokens", type=int, default=32)
    parser.add_argument("--prompt", type=int, default=512)
    parser.add_argument("--pairs", type=int, default=3)
    parser.add_argument("--quantization", default="auto")
    asked = parser.parse_args()

    def seen(stages: int, pair: int) -> tuple[float, ...]:
        settings: dict[str, Any] = {"quantization": asked.quantization, "threads": asked.threads, "max_model_len": 1024}
        with LLM(
            asked.model, device="cpu", pipeline_parallel_size=stages, enable_prefix_caching=False, **settings
        ) as llm:
            llm.wait_compiled()
            _, *settled = (rates(llm, asked.rows, asked.tokens, asked.prompt, 3 * pair + run) for run in range(3))
            return tuple(max(each) for each in zip(*settled, strict=True))

    found: dict[int, list[tuple[float, ...]]] = {1: [], asked.stages: []}
    for pair in range(asked.pairs):
        for stages, rounds in found.items():
            rounds.append(seen(stages, pair))
    medians = {stages: [statistics.median(each) for each in zip(*seen, strict=True)] for stages, seen in found.items()}
    ratios = [several / one for several, one in zip(medians[asked.stages], medians[1], strict=True)]
    names = ("decode", "prompts", "one_prompt", "one_row")
    longer = 1 / medians[asked.stages][-1] - 1 / medians[1][-1]
    print(
        json.dumps(
            {
                "stages": asked.stages,
                "hop_ms": round(1e3 * longer / asked.stages, 3),
                **{
                    name: {
                        "one": round(medians[1][i], 1),
                        "stages": round(medians[asked.stages][i], 1),
                        "ratio": round(ratios[i], 3),
                    }
                    for i, name in enumerate(names)
                },
            }
        )
    )


if __name__ == "__main__":
    main()
