"""What arrives when: requests of given lengths, Poisson arrivals, drawn once and the same for every system and rate.

A rate only stretches the time between arrivals, so two systems are compared on the same requests, and a curve over
rates is smooth.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from entrypoints.bench.paper.lengths import LONGEST, Lengths

_FILLER = 1
"""a token id of prompts whose content does not matter"""
_DRAWN = 4096
"""requests drawn at a time"""


@dataclass(frozen=True)
class Job:
    """One request of the trace; `arrival_s` on the virtual clock."""

    arrival_s: float
    prompt: list[int]
    output: int
    """tokens that each of its samples generates"""


Shapes = list[tuple[list[int], int]]
"""prompts and output lengths"""
Draw = Callable[[np.random.Generator, int], Shapes]
"""(generator, count) → so many"""


class _Drawn:
    """Gaps between requests at one a second, and shapes of the requests; drawn once, as many as any rate needed."""

    def __init__(self, draw: Draw, seed: int) -> None:
        self._draw = draw
        self._gaps, self._shapes = np.random.default_rng([seed, 0]), np.random.default_rng([seed, 1])
        self._parts: list[tuple[NDArray[np.float64], Shapes]] = []

    def parts(self) -> Iterator[tuple[NDArray[np.float64], Shapes]]:
        """`_DRAWN` requests at a time, without end."""
        for place in itertools.count():
            if place == len(self._parts):
                self._parts.append((self._gaps.exponential(1.0, size=_DRAWN), self._draw(self._shapes, _DRAWN)))
            yield self._parts[place]


@dataclass(frozen=True)
class Workload:
    """Lengths, and what is asked of each prompt."""

    name: str
    draw: Draw
    samples: int = 1
    beams: bool = False
    """the `samples` are beams of one search"""
    _drawn: dict[int, _Drawn] = field(default_factory=dict, init=False, repr=False, compare=False)
    """by seed"""

    def jobs(self, rate: float, seconds: float, seed: int) -> list[Job]:
        """All that arrives in `seconds` at `rate` a second; at least one request."""
        jobs: list[Job] = []
        now = 0.0
        for gaps, shapes in self._drawn.setdefault(seed, _Drawn(self.draw, seed)).parts():
            arrivals = now + np.cumsum(gaps) / rate
            for arrival, (prompt, output) in zip(arrivals.tolist(), shapes):
                if arrival > seconds and jobs:
                    return jobs
                jobs.append(Job(arrival, prompt, output))
            now = float(arrivals[-1])
        raise AssertionError("requests never end")

    def backlog(self, count: int, seed: int) -> list[Job]:
        """So many requests, all there from the start: the load that saturates."""
        shapes = np.random.default_rng([seed, 1])
        return [Job(0.0, prompt, output) for prompt, output in self.draw(shapes, count)]


def plain(lengths: Lengths, samples: int = 1, beams: bool = False) -> Workload:
    """Prompts that have nothing in common."""

    def draw(rng: np.random.Generator, count: int) -> list[tuple[list[int], int]]:
        prompts, outputs = lengths.prompt.draw(rng, count).tolist(), lengths.output.draw(rng, count).tolist()
        return [([_FILLER] * prompt, output) for prompt, output in zip(prompts, outputs)]

    what = "" if samples == 1 else f", {'beam width' if beams else 'samples'} {samples}"
    return Workload(lengths.name + what, draw, samples, beams)


def with_prefix(lengths: Lengths, prefix_len: int) -> Workload:
    """Every prompt begins with the same tokens (§6.4); what follows is its own."""

    def draw(rng: np.random.Generator, count: int) -> list[tuple[list[int], int]]:
        drawn = plain(lengths).draw(rng, count)
        prefix = list(range(2, 2 + prefix_len))
        return [(prefix + rng.integers(1000, 30000, size=len(prompt)).tolist(), out) for prompt, out in drawn]

    return Workload(f"{lengths.name}, prefix of {prefix_len}", draw)


def chat(lengths: Lengths, mean_rounds: float) -> Workload:
    """A chat's next round (§6.5): the history and the query, cut to the last `LONGEST` tokens. Earlier rounds are
    geometric in number, with lengths as any; nothing is kept between rounds."""

    def draw(rng: np.random.Generator, count: int) -> list[tuple[list[int], int]]:
        drawn = []
        rounds = rng.geometric(1 / (1 + mean_rounds), size=count) - 1
        queries, outputs = lengths.prompt.draw(rng, count).tolist(), lengths.output.draw(rng, count).tolist()
        for number, query, output in zip(rounds.tolist(), queries, outputs):
            history = int(lengths.prompt.draw(rng, number).sum() + lengths.output.draw(rng, number).sum())
            drawn.append(([_FILLER] * min(history + query, LONGEST), output))
        return drawn

    return Workload(f"{lengths.name} chat", draw)
