"""What steps cost here, learnt from those that were seen: running sums and means that forget."""

from __future__ import annotations

from engine.step import Rows

_FORGETS = 0.99
_PRIOR_SLOPE = 0.05
"""what a position more costs of a step with one, before steps of several sizes were seen"""
_PRIOR_WEIGHT = 4.0
_LEAST_SLOPE = 0.1
"""of the prior: nothing is free, whatever a disturbed step says"""
_MOST_TIMES = 3.0
"""what a step may have taken of a mean one, as far as is learnt from it: more is the machine's"""
_MEMORY = 0.8
"""weight of the past in running means"""


class StepCosts:
    def __init__(self) -> None:
        self.forget()

    def forget(self) -> None:
        """Nothing is known."""
        self.prompt_token_s = 0.0
        """what a token of a prompt costs; 0: unknown"""
        self._sums = (0.0, 0.0, 0.0, 0.0, 0.0)
        """of steps of n tokens that all sample, and s seconds: forgetting sums of 1, n, n², s, n·s"""
        self._decodes_s = 0.0
        self._row_tokens = 1.0
        """tokens that a row computes in a step, drafts included"""

    def observe(self, rows: Rows, drafts: int, seconds: float) -> None:
        """A step has taken as long, with as many drafts. What a token of a prompt costs is what a step takes longer for
        it: beside sequences that decode, a step reads the weights anyway."""
        num_rows, prompts = len(rows), rows.query_lens != rows.samples
        num_decodes, prompt_tokens = num_rows - int(prompts.sum()), int(rows.query_lens[prompts].sum())
        if num_decodes == num_rows:
            self._row_tokens = _mean(self._row_tokens, 1 + drafts / num_rows)
            seconds = min(seconds, _MOST_TIMES * self._decodes_s or seconds)
            self._decodes_s = _mean(self._decodes_s, seconds)
            n = num_rows + drafts
            new = (1, n, n * n, seconds, n * seconds)
            ones, n1, nn, s, ns = (_FORGETS * past + each for past, each in zip(self._sums, new))
            self._sums = ones, n1, nn, s, ns
        elif prompt_tokens + num_decodes >= 2 * num_rows:
            step_s, row_s = self.rows_s()
            extra = seconds - (step_s + row_s * num_decodes) if num_decodes else seconds
            self.prompt_token_s = _mean(self.prompt_token_s, max(extra, 0.0) / prompt_tokens)

    @property
    def decode_s(self) -> float:
        """What a step takes that computes no prompt; 0: unknown."""
        return self._decodes_s

    def relative(self) -> tuple[float, float]:
        """(a, b): a step of n tokens that all sample takes a + b · n, in units of what one of one token takes."""
        first, slope = self._fitted()
        return max(1 - slope / first, 0.0), slope / first

    def rows_s(self) -> tuple[float, float]:
        """(a, b): a step of n rows that all decode takes a + b · n seconds. Before one was seen, a row costs what a
        token of a prompt does; 0, 0: nothing is known."""
        if not self._sums[0]:
            return 0.0, self.prompt_token_s
        first, slope = self._fitted()
        return max(first - slope, 0.0), slope * self._row_tokens

    def _fitted(self) -> tuple[float, float]:
        """What a step of one token takes, and of each more: least squares."""
        ones, n, nn, s, ns = self._sums
        if not ones:
            return 1.0, _PRIOR_SLOPE
        mean_n, mean_s = n / ones, s / ones
        prior = _PRIOR_SLOPE * mean_s / (1 + _PRIOR_SLOPE * (mean_n - 1))
        spread, together = nn - n * mean_n, ns - n * mean_s
        slope = max((together + _PRIOR_WEIGHT * prior) / (spread + _PRIOR_WEIGHT), _LEAST_SLOPE * prior)
        return max(mean_s - slope * (mean_n - 1), 1e-9), slope


def _mean(past: float, new: float) -> float:
    return _MEMORY * past + (1 - _MEMORY) * new if past else new
