"""More prefixes in use than the KV cache holds: requests in the order in which they came, beside the engine's own
order, in which whoever finds most in the prefix cache starts first (`engine/scheduling/admission.py`).

`--heads` beginnings of `--head-tokens` tokens, `--each` requests with every one of them, shuffled, all there from the
start. The cache holds `--room` of all heads. Both orders in turn, `--pairs` times, in one process.

Prints a line of JSON for each run, and the ratios. Usage: ``python tools/bench_prefix_order.py MODEL [--pairs 2]``.
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
import time

from engine import LLM, SamplingParams
from engine.config import make_args
from engine.kv_budget import kv_bytes_per_token
from engine.resolve import resolve_here
from engine.scheduling import admission

OWN_ORDER, STRICT_ORDER = admission.LOOKED_AT, 1


def prompts_of(asked: argparse.Namespace, vocab_size: int) -> list[dict[str, list[int]]]:
    draw = random.Random(asked.seed)
    heads = [[draw.randrange(vocab_size) for _ in range(asked.head_tokens)] for _ in range(asked.heads)]
    own = [[draw.randrange(vocab_size) for _ in range(asked.own_tokens)] for _ in range(asked.heads * asked.each)]
    prompts = [heads[index % asked.heads] + tokens for index, tokens in enumerate(own)]
    draw.shuffle(prompts)
    return [{"prompt_token_ids": prompt} for prompt in prompts]


def run(llm: LLM, prompts: list[dict[str, list[int]]], looked_at: int, tokens: int) -> tuple[dict[str, float], object]:
    admission.LOOKED_AT = looked_at
    llm.reset_prefix_cache()
    params = SamplingParams(temperature=0.0, max_tokens=tokens, ignore_eos=True)
    before, began = llm.stats(), time.perf_counter()
    outputs = llm.generate(prompts, params, use_tqdm=False)
    seconds, after = time.perf_counter() - began, llm.stats()
    looked_up = after.prefix_query_tokens - before.prefix_query_tokens
    found = after.prefix_hit_tokens - before.prefix_hit_tokens
    return {"looked_at": looked_at, "seconds": seconds, "found": found / looked_up}, [
        output.outputs[0].token_ids for output in outputs
    ]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model")
    parser.add_argument("--heads", type=int, default=24)
    parser.add_argument("--each", type=int, default=6)
    parser.add_argument("--head-tokens", type=int, default=384)
    parser.add_argument("--own-tokens", type=int, default=16)
    parser.add_argument("--tokens", type=int, default=8, help="of each answer")
    parser.add_argument("--rows", type=int, default=8, help="requests at a time")
    parser.add_argument("--room", type=float, default=0.5, help="of all heads, what the cache holds")
    parser.add_argument("--pairs", type=int, default=2)
    parser.add_argument("--seed", type=int, default=5)
    asked = parser.parse_args()
    longest = asked.head_tokens + asked.own_tokens + asked.tokens
    settings = {"max_model_len": longest + 16, "max_num_seqs": asked.rows}
    model, config = resolve_here(make_args(asked.model, settings))
    per_token = kv_bytes_per_token(model.facts.layers, config.cache.dtype)
    room = asked.room * asked.heads * asked.head_tokens + asked.rows * (asked.own_tokens + asked.tokens + 16)
    with LLM(asked.model, kv_cache_memory=round(room * per_token), **settings) as llm:
        prompts = prompts_of(asked, llm.model_config.vocab_size)
        llm.generate(prompts[:2], SamplingParams(max_tokens=4), use_tqdm=False)
        llm.wait_compiled()
        ratios, tokens = [], list[object]()
        for pair in range(asked.pairs):
            seconds = dict[int, float]()
            for looked_at in (STRICT_ORDER, OWN_ORDER) if pair % 2 else (OWN_ORDER, STRICT_ORDER):
                figures, given = run(llm, prompts, looked_at, asked.tokens)
                seconds[looked_at] = figures["seconds"]
                tokens.append(given)
                print(json.dumps(figures), flush=True)
            ratios.append(seconds[STRICT_ORDER] / seconds[OWN_ORDER])
    same = all(each == tokens[0] for each in tokens)
    print(json.dumps({"speed_up": statistics.median(ratios), "same_tokens": same}))


if __name__ == "__main__":
    main()
