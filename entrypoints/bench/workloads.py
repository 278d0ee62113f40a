"""The workloads by which this engine and its peers are compared, and random ones of any shape.

Lengths and arrivals depend only on the workload's name (seed 0); token ids also on the repeat, so that a repeat does
not hit the prefix cache that the repeat before it filled.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

SEED = 0
FIRST_ID, END_ID = 100, 40000
"""token ids are drawn from [FIRST_ID, END_ID)"""
WARM_UP_REPEAT = -1
WARM_UP_SEED = 2**31
"""of random warm-up requests: no repeat's seed"""


@dataclass(frozen=True)
class BenchRequest:
    prompt_token_ids: list[int]
    max_tokens: int
    arrival_s: float
    """seconds after the run starts"""
    beams: int = 0
    """not 0: a search of this width for one sequence"""


@dataclass(frozen=True)
class Shape:
    wid: int
    about: str
    draw: Callable[[np.random.Generator, np.random.Generator], list[BenchRequest]]


def _ids(tokens: np.random.Generator, length: int) -> list[int]:
    ids: list[int] = tokens.integers(FIRST_ID, END_ID, size=int(length)).tolist()
    return ids


def _uniform(
    count: int, n_in: int, n_out: int
) -> Callable[[np.random.Generator, np.random.Generator], list[BenchRequest]]:
    return lambda shape, tokens: [BenchRequest(_ids(tokens, n_in), n_out, 0.0) for _ in range(count)]


def _mixed(shape: np.random.Generator, tokens: np.random.Generator) -> list[BenchRequest]:
    n_in = shape.integers(16, 513, size=128)
    n_out = shape.integers(16, 257, size=128)
    return [BenchRequest(_ids(tokens, a), int(b), 0.0) for a, b in zip(n_in, n_out)]


def _shared_prefix(shape: np.random.Generator, tokens: np.random.Generator) -> list[BenchRequest]:
    prefix = _ids(tokens, 512)
    return [BenchRequest(prefix + _ids(tokens, 32), 32, 0.0) for _ in range(64)]


def _poisson(shape: np.random.Generator, tokens: np.random.Generator) -> list[BenchRequest]:
    gaps = shape.exponential(1 / 4.0, size=64)
    arrivals = np.cumsum(gaps) - gaps[0]
    return [BenchRequest(_ids(tokens, 128), 64, float(t)) for t in arrivals]


def _beams(shape: np.random.Generator, tokens: np.random.Generator) -> list[BenchRequest]:
    return [BenchRequest(_ids(tokens, n), 64, 0.0, beams=4) for n in shape.integers(32, 257, size=20)]


WORKLOADS = {
    "W1": Shape(1, "one request, 32 in / 128 out", _uniform(1, 32, 128)),
    "W2": Shape(2, "64 requests, 128 in / 128 out", _uniform(64, 128, 128)),
    "W3": Shape(3, "128 requests, 16-512 in / 16-256 out", _mixed),
    "W4": Shape(4, "64 requests, shared 512 + 32 in / 32 out", _shared_prefix),
    "W5": Shape(5, "one request, 2,048 in / 1 out", _uniform(1, 2048, 1)),
    "W6": Shape(6, "64 requests, Poisson 4/s, 128 in / 64 out", _poisson),
    "W7": Shape(7, "20 requests, 32-256 in / 64 out, beam search of width 4", _beams),
    "WARM": Shape(9, "warm-up: 4 requests, 48 in / 16 out", _uniform(4, 48, 16)),
}


def workload(name: str, repeat: int = 0) -> list[BenchRequest]:
    """Requests of a named workload. Raises ValueError naming those that exist."""
    if name not in WORKLOADS:
        raise ValueError(f"unknown workload {name!r}; known: {', '.join(w for w in WORKLOADS if w != 'WARM')}")
    shape = WORKLOADS[name]
    tokens = np.random.default_rng([SEED, shape.wid, repeat if repeat >= 0 else 999983])
    return shape.draw(np.random.default_rng([SEED, shape.wid]), tokens)


def random_workload(
    count: int, input_len: int, output_len: int, rate: float | None, vocab: int, seed: int, range_ratio: float = 0.0
) -> list[BenchRequest]:
    """`count` requests of random ids below `vocab`; lengths within ±`range_ratio`; Poisson arrivals at `rate`/s."""
    rng = np.random.default_rng(seed)

    def lengths(mean: int) -> list[int]:
        low, high = max(1, round(mean * (1 - range_ratio))), round(mean * (1 + range_ratio))
        return [int(x) for x in rng.integers(low, high + 1, size=count)]

    n_in, n_out = lengths(input_len), lengths(output_len)
    at = np.cumsum(rng.exponential(1 / rate, size=count)) if rate else np.zeros(count)
    first = min(FIRST_ID, vocab - 1)
    return [
        BenchRequest([int(i) for i in rng.integers(first, vocab, size=n_in[i])], n_out[i], float(at[i] - at[0]))
        for i in range(count)
    ]
