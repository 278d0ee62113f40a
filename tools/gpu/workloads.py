"""The throughput workloads: the mixed one that small engines are compared by, and one of uniform lengths."""

from __future__ import annotations

import random
from dataclasses import dataclass

MIXED_PROMPT_TOKENS, MIXED_OUTPUT_TOKENS = 142_827, 133_966
"""totals of `mixed(256)`; a test holds them"""
END_ID = 10_000


@dataclass(frozen=True)
class Workload:
    name: str
    prompts: list[list[int]]
    output_lens: list[int]

    @property
    def prompt_tokens(self) -> int:
        return sum(map(len, self.prompts))

    @property
    def output_tokens(self) -> int:
        return sum(self.output_lens)


def mixed(count: int, low: int = 100, high: int = 1024, end_id: int = END_ID) -> Workload:
    """Lengths in and out uniform in [low, high], ids in [0, end_id]; the order of draws is part of the workload."""
    rng = random.Random(0)
    prompts = [[rng.randint(0, end_id) for _ in range(rng.randint(low, high))] for _ in range(count)]
    return Workload(f"{count} x {low}-{high} in/out", prompts, [rng.randint(low, high) for _ in range(count)])


def uniform(count: int, input_len: int, output_len: int, end_id: int = END_ID) -> Workload:
    rng = random.Random(1)
    prompts = [[rng.randint(0, end_id) for _ in range(input_len)] for _ in range(count)]
    return Workload(f"{count} x {input_len}/{output_len}", prompts, [output_len] * count)
