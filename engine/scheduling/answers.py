"""How long answers are, learnt from those that have ended."""

from __future__ import annotations

import math
from collections import OrderedDict
from copy import deepcopy

import numpy as np

_MEMORY = 0.95
_MOST_TIMES = 4.0
"""what one may be of the mean, as far as is learnt from it"""
_SURE = 1.5
"""standard deviations over the mean: few answers are longer"""
_PRIOR = 256.0
"""tokens of an answer, if as many are allowed, before many have ended: those that end first are short ones"""
_MOST_TENANTS = 1024
"""whose answers are known apart"""


class RunningMean:
    """A mean that forgets, and how far values are from it."""

    def __init__(self, prior: float = 0.0, memory: float = _MEMORY) -> None:
        """`prior`: 0 for none; the first value is the mean, then. `memory`: weight of the past."""
        self.mean, self._square, self._memory = prior, prior * prior, memory

    def add(self, value: float) -> None:
        weight = self._memory if self.mean else 0.0
        value = min(value, _MOST_TIMES * self.mean or value)  # one that stood still says little of others
        self.mean = weight * self.mean + (1 - weight) * value
        self._square = weight * self._square + (1 - weight) * value * value

    @property
    def deviation(self) -> float:
        """The standard deviation, or the mean if that is less: what is long past stays longest in squares."""
        return min(math.sqrt(max(self._square - self.mean * self.mean, 0.0)), self.mean)


class _Lengths:
    """In tokens, and as a part of what was allowed: whichever of them varies less tells more of the next one."""

    def __init__(self) -> None:
        self.tokens, self._parts = RunningMean(_PRIOR), RunningMean(1.0)

    def add(self, tokens: int, most: int) -> None:
        self.tokens.add(tokens)
        self._parts.add(tokens / max(most, 1))

    def line(self) -> tuple[float, float, float, float]:
        """(c, p, d, q): one that may have m tokens has c + p · m in the mean, and a deviation of d + q · m."""
        tokens, parts = self.tokens, self._parts
        if parts.deviation * tokens.mean < tokens.deviation * parts.mean:
            return 0.0, parts.mean, 0.0, parts.deviation
        return tokens.mean, 0.0, tokens.deviation, 0.0


class Answers:
    """By tenants' names: nobody's long answers make others' deadlines too short."""

    def __init__(self) -> None:
        self._of: OrderedDict[str, _Lengths] = OrderedDict()
        self._all = _Lengths()
        """what is thought of who is new"""

    def __len__(self) -> int:
        return len(self._of)

    @property
    def mean(self) -> float:
        """Tokens, of all."""
        return self._all.tokens.mean

    def ended(self, tenant: str, tokens: int, most: int, by_itself: bool) -> None:
        """An answer had so many tokens, and might have had `most`. Of one that was broken off it is known that it would
        have been longer."""
        lengths = self._of.get(tenant) or deepcopy(self._all)
        self._of[tenant] = lengths
        self._of.move_to_end(tenant)
        if len(self._of) > _MOST_TENANTS:
            self._of.popitem(last=False)
        if by_itself or tokens > lengths.tokens.mean:
            lengths.add(tokens, most)
            self._all.add(tokens, most)

    def expected(self, tenant: str, most: int) -> tuple[float, float]:
        """Of the tenant's next one that may have `most` tokens: how many it has in the mean, and how many more it may
        well have."""
        constant, part, more, more_part = self._of.get(tenant, self._all).line()
        mean = min(constant + part * most, most)
        return mean, min(_SURE * (more + more_part * most), most - mean)

    def left(self, tenants: list[str], most: np.ndarray, had: np.ndarray) -> np.ndarray:
        """Of those that have `had` tokens by now of at most `most`, int64: how many may well be to come, float64. Of
        one that is longer than that: as many as answers differ."""
        lines = {tenant: self._of.get(tenant, self._all).line() for tenant in set(tenants)}
        constant, part, more, more_part = np.array([lines[tenant] for tenant in tenants]).reshape(-1, 4).T
        mean, more = constant + part * most, more + more_part * most
        left: np.ndarray = np.minimum(np.maximum(mean + _SURE * more - had, more), most - had)
        return left
