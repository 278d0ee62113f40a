"""When those that run and wait, and one that comes, will have ended: every step has a part for each row, so whoever
comes makes all others slower (processor sharing). Whoever ends is followed by another one, as far as there are so many
that come: then as many run as now, and prompts have their part of each step."""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np


@dataclass(frozen=True)
class Prices:
    """Seconds of a step, of each of its rows, and of a token of a prompt."""

    step_s: float
    row_s: float
    prompt_token_s: float


@dataclass(frozen=True)
class Job:
    """A request that has not begun: steps of each of its rows, and tokens of its prompt."""

    steps: float
    prompt_tokens: float
    rows: int = 1


@dataclass(frozen=True)
class Forecast:
    prices: Prices
    typical: Job
    """of those that come"""
    arrivals_per_s: float
    running: int
    """rows"""
    rows: int
    """that can run at a time"""
    prompt_tokens: float
    """of those that run, still to be computed"""
    waiting: int = 0
    """who is before any that comes"""
    waiting_steps: float = math.inf
    """of a row of theirs at most"""
    waiting_prompt_tokens: float = 0.0
    """of one of them"""
    step_tokens: float = 1e9
    """that a step computes at most"""

    def step_s(self, rows: float) -> float:
        """What a step takes, with its part of the prompts of those that follow."""
        typical, prices = self.typical, self.prices
        alone, prompt_s = prices.step_s + rows * prices.row_s, typical.prompt_tokens * prices.prompt_token_s
        most_s = self.step_tokens * prices.prompt_token_s
        all_follow = alone + min(rows * prompt_s / max(typical.steps, 1.0), most_s)
        left = 1.0 - prompt_s * self.arrivals_per_s  # of the time, after the prompts of all that come
        return min(all_follow, alone / left) if left > 0.0 else all_follow

    @property
    def _line(self) -> int:
        """Those that cannot start at once."""
        return max(self.running + self.waiting - self.rows, 0)

    def _beside(self, job: Job) -> float:
        """What a step takes with that one."""
        return self.step_s(min(self.running + self.waiting + job.rows, max(self.rows, job.rows)))

    def _prompts_s(self) -> float:
        """Of those that run, and of those that are about to."""
        begin = (self.waiting - self._line) * self.waiting_prompt_tokens
        return self.prices.prompt_token_s * (self.prompt_tokens + begin)

    def seconds(self, job: Job) -> float:
        """Until that one, which comes now, has ended."""
        starts_s, prices = 0.0, self.prices
        if self.running + self.waiting + job.rows > self.rows:
            typical, rows = self.typical, max(self.rows, 1)
            prompts_s = self._line * self.waiting_prompt_tokens * prices.prompt_token_s
            steps = (self._line * min(typical.steps, self.waiting_steps) + typical.steps) / rows
            starts_s = steps * (prices.step_s + rows * prices.row_s) + prompts_s
        own = job.prompt_tokens * prices.prompt_token_s
        return starts_s + job.steps * self._beside(job) + self._prompts_s() + own

    def takes_s(self, job: Job) -> float:
        """Of the time of a server that runs as many as now."""
        rows, prices = max(min(self.running + self.waiting, self.rows), 1), self.prices
        row_s = prices.step_s / rows + prices.row_s
        return job.rows * job.steps * row_s + job.prompt_tokens * prices.prompt_token_s

    def running_s(self, steps: np.ndarray) -> np.ndarray:
        """Until those that run have ended that have so many steps to go, float64."""
        seconds: np.ndarray = steps * self.step_s(min(self.running + self.waiting, self.rows)) + self._prompts_s()
        return seconds

    def known_s(self, steps: np.ndarray) -> np.ndarray:
        """As `running_s`, but for what only waits, and with no more of the others' prompts than fits into its steps."""
        prompts = np.minimum(self.prompt_tokens, steps * self.step_tokens)
        seconds: np.ndarray = steps * self.step_s(min(self.running, self.rows)) + prompts * self.prices.prompt_token_s
        return seconds

    def delays_s(self, steps: np.ndarray, job: Job) -> np.ndarray:
        """How much later each of those ends for that one, which delays nobody as long as it stands in line."""
        prices = self.prices
        delays = np.minimum(steps, job.steps) * job.rows * prices.row_s + job.prompt_tokens * prices.prompt_token_s
        return np.zeros(len(steps)) if self._line else delays
