"""Two replicas and prompts that begin alike: what the router finds again, and how evenly it loads them, beside taking
turns.

Each prompt is one of `--heads` beginnings of `--head-tokens` tokens and as many tokens of its own as make the head
`--reuse` of it; `--concurrency` requests are under way at a time. The KV cache of a replica holds `--room` of all
heads. The ideal is what one cache that forgets nothing would find. A replica's load is what its core computed,
in tokens.

Prints a line of JSON for each policy. Usage: ``python tools/bench_routing.py MODEL [--requests 240]``.
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
import time

from engine.config import EngineArgs, EngineConfig, make_args
from engine.core.wire import AddRequest, StepOutputs, each_delta
from engine.kv_budget import kv_bytes_per_token
from engine.replicas.client import ReplicatedClient
from engine.replicas.router import Router
from engine.resolve import resolve_here
from engine.step import RowParams
from entrypoints.bench.cluster.routers import TakingTurns
from entrypoints.bench.cluster.simulate import loads_and_hits


def prompts_of(asked: argparse.Namespace, vocab_size: int) -> list[tuple[int, list[int]]]:
    """(head, tokens) of each request; each head is as likely as any other."""
    draw = random.Random(asked.seed)
    heads = [[draw.randrange(vocab_size) for _ in range(asked.head_tokens)] for _ in range(asked.heads)]
    own = round(asked.head_tokens / asked.reuse) - asked.head_tokens
    chosen = [draw.randrange(asked.heads) for _ in range(asked.requests)]
    return [(head, heads[head] + [draw.randrange(vocab_size) for _ in range(own)]) for head in chosen]


def ideal_hits(prompts: list[tuple[int, list[int]]], head_tokens: int, block_size: int) -> int:
    """Tokens: of every head after its first request."""
    seen: set[int] = set()
    hits = 0
    for head, _ in prompts:
        hits += head_tokens // block_size * block_size if head in seen else 0
        seen.add(head)
    return hits


def run(client: ReplicatedClient, prompts: list[tuple[int, list[int]]], asked: argparse.Namespace) -> dict[str, float]:
    waiting = [
        AddRequest(
            request_id=f"r{index}",
            prompt_token_ids=tokens,
            params=RowParams(seed=index, temperature=0.0),
            max_tokens=asked.output,
        )
        for index, (_, tokens) in enumerate(prompts)
    ][::-1]
    sent: dict[str, float] = {}
    first: dict[str, float] = {}
    under_way = 0
    began = time.monotonic()
    last: StepOutputs | None = None
    while waiting or under_way:
        while waiting and under_way < asked.concurrency:
            message = waiting.pop()
            client.send(message)
            sent[message.request_id] = time.monotonic()
            under_way += 1
        last = client.recv()
        now = time.monotonic()
        for delta in each_delta(last.deltas):
            if delta.token_ids:
                first.setdefault(delta.request_id, now - sent[delta.request_id])
            under_way -= delta.finish_reason is not None
    assert last is not None
    stats = last.stats
    loads, _ = loads_and_hits([*client.stats_of_each().values()])
    return {
        "seconds": round(time.monotonic() - began, 2),
        "hit_tokens": stats.prefix_hit_tokens,
        "of_ideal": round(stats.prefix_hit_tokens / ideal_hits(prompts, asked.head_tokens, 16), 3),
        "load_max_over_mean": round(max(loads) / statistics.mean(loads), 3),
        "ttft_median_s": round(statistics.median(first.values()), 3),
        "ttft_p90_s": round(statistics.quantiles(first.values(), n=10)[8], 3),
    }


def config_of(asked: argparse.Namespace) -> EngineConfig:
    model, config = resolve_here(EngineArgs(model=asked.model))
    tokens = asked.heads * asked.head_tokens * asked.room + asked.concurrency * (asked.head_tokens / asked.reuse + 64)
    memory = int(tokens * kv_bytes_per_token(model.facts.layers, config.cache.dtype))
    settings = {"data_parallel_size": asked.replicas, "kv_cache_memory": memory, "max_model_len": 2048}
    return resolve_here(make_args(asked.model, settings))[1]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0] if __doc__ else None)
    parser.add_argument("model")
    parser.add_argument("--replicas", type=int, default=2)
    parser.add_argument("--requests", type=int, default=240)
    parser.add_argument("--heads", type=int, default=12)
    parser.add_argument("--head-tokens", type=int, default=512)
    parser.add_argument("--reuse", type=float, default=0.8)
    parser.add_argument("--room", type=float, default=0.6)
    parser.add_argument("--output", type=int, default=16)
    parser.add_argument("--concurrency", type=int, default=8)
    parser.add_argument("--seed", type=int, default=0)
    asked = parser.parse_args()
    config = config_of(asked)
    prompts = prompts_of(asked, config.model.vocab_size)
    for name, router in (("router", Router(16)), ("taking turns", TakingTurns(16))):
        client = ReplicatedClient(config, router=router)
        try:
            client.start()
            client.wait_compiled()
            print(json.dumps({"policy": name, **run(client, prompts, asked)}), flush=True)
        finally:
            client.close()


if __name__ == "__main__":
    main()
