"""Request lengths: log-normal fits to the means that the paper publishes (the labels of Fig. 11; §6.1 has their ratios:
prompts 8.4 times, outputs 5.8 times as long in ShareGPT as in Alpaca).

The data sets themselves are not needed. A fit is a log-normal that is cut at the longest length and rounded up; its
location is solved for, so that the mean *after* the cut is the published one. The paper prints no spreads. Those of
the outputs are read off its figures instead: while Orca (Max) is full, the slots it keeps for tokens to come are
E[out^2] / (2 E[out]) a request, which Fig. 2 (13.3 % of 15.7K slots, seven requests) puts at 298 for ShareGPT. The
other spreads are chosen so that the averages of Fig. 13 come out (how many requests Oracle and Pow2 hold); they move
no mean.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cached_property
from statistics import NormalDist

import numpy as np
from numpy.typing import NDArray

LONGEST = 1024
"""of a prompt, and of an output: half of OPT's context, so that no request exceeds it"""

_NORMAL = NormalDist()


@dataclass(frozen=True)
class LengthFit:
    """Lengths in tokens, 1 .. `longest`."""

    mean: float
    sigma: float
    """standard deviation of the logarithm, before the cut"""
    longest: int = LONGEST

    @cached_property
    def mu(self) -> float:
        """Location at which the mean of what is drawn is `mean`."""
        low, high = math.log(self.mean) - 8 * self.sigma - 1, math.log(self.longest) + 8 * self.sigma
        for _ in range(80):
            middle = (low + high) / 2
            low, high = (middle, high) if self.mean_at(middle) < self.mean else (low, middle)
        return (low + high) / 2

    def mean_at(self, mu: float) -> float:
        """Mean of min(ceil(X), longest): the sum of P(X > k) for k = 0 .. longest - 1."""
        return 1 + sum(1 - _NORMAL.cdf((math.log(length) - mu) / self.sigma) for length in range(1, self.longest))

    def draw(self, rng: np.random.Generator, count: int) -> NDArray[np.int64]:
        lengths = np.ceil(np.exp(rng.normal(self.mu, self.sigma, size=count)))
        drawn: NDArray[np.int64] = np.clip(lengths, 1, self.longest).astype(np.int64)
        return drawn


@dataclass(frozen=True)
class Lengths:
    """Prompt and output lengths of one data set, independent of each other."""

    name: str
    prompt: LengthFit
    output: LengthFit


SHAREGPT = Lengths("ShareGPT", LengthFit(161.31, 1.0), LengthFit(337.99, 0.8))
ALPACA = Lengths("Alpaca", LengthFit(19.31, 0.6), LengthFit(58.45, 0.9))
TRANSLATION = Lengths("WMT16 En-De", LengthFit(35, 0.55), LengthFit(45, 0.55))
"""no lengths are published: English sentences in, German ones out, in LLaMA's tokens"""
