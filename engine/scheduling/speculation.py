"""How many drafts each sequence computes in the next step: as many as are likely to make tokens cheaper.

A draft costs a position of the step, and brings a token if it and all before it are right. What a position costs is
learnt from steps (a step takes a + b · tokens, fitted by least squares that forget), how likely a sequence's drafts are
right from those that were looked at. Those with the best chances are taken while the expected tokens per second rise.
"""

from __future__ import annotations

import numpy as np

from engine.config import SpeculationConfig
from engine.scheduling.holdings import Holdings
from engine.scheduling.sequence import Sequence
from engine.scheduling.steps_in_flight import PlannedStep
from engine.step import StepResult

_FORGETS = 0.99
_PRIOR_SLOPE = 0.05
"""what a position more costs of a step with one, before steps of several sizes were seen"""
_PRIOR_WEIGHT = 4.0
_PRIOR_RATE, _PRIOR_TRIES = 0.7, 2.0
"""how often a draft is right, before any was looked at, and how many looks that is worth"""
_REMEMBERED_TRIES = 32.0
_HOPE = 0.95
"""drafts are proposed at all where ones that are right as often would pay"""
_PROMPTS_TO_DRAFTS = 8
"""where there are prompts, drafts may take one in as many tokens of what they would have"""
_FORCED_RATE = 0.98
"""what a grammar forces is nearly always what is sampled; it might be spelled in other tokens"""


class StepCosts:
    """Seconds of a step by its tokens, where all of them sample."""

    def __init__(self) -> None:
        self._sums = (0.0, 0.0, 0.0, 0.0, 0.0)
        """forgetting sums of 1, n, n², s, n·s"""

    def observe(self, n: int, s: float) -> None:
        ones, n1, n2, s1, ns = (_FORGETS * each for each in self._sums)
        self._sums = (ones + 1, n1 + n, n2 + n * n, s1 + s, ns + n * s)

    def relative(self) -> tuple[float, float]:
        """(a, b): a step of n tokens takes a + b · n, in units of what one of one token takes."""
        ones, n, nn, s, ns = self._sums
        if not ones:
            return 1 - _PRIOR_SLOPE, _PRIOR_SLOPE
        mean_n, mean_s = n / ones, s / ones
        prior = _PRIOR_SLOPE * mean_s / (1 + _PRIOR_SLOPE * (mean_n - 1))
        spread, together = nn - n * mean_n, ns - n * mean_s
        slope = max((together + _PRIOR_WEIGHT * prior) / (spread + _PRIOR_WEIGHT), 0.0)
        first = max(mean_s - slope * (mean_n - 1), 1e-9)
        return max(1 - slope / first, 0.0), slope / first


class Speculation:
    def __init__(self, held: Holdings, config: SpeculationConfig, max_drafts: int) -> None:
        """`max_drafts`: of one step."""
        self._held, self._rows = held, held.rows
        self._most = config.num_speculative_tokens
        self._proposes = config.method is not None and self._most > 0
        self._max_drafts = max_drafts
        self._costs = StepCosts()
        self._wanted: dict[int, int] = {}
        """by sequences that decode; as of the costs at that time"""
        self._age = 0
        self.drafted = self.accepted = 0
        """since the start"""
        self.accepted_at = [0] * self._most
        """drafts that were right, by their position"""

    def proposals(self, num_decodes: int) -> int:
        """How many the device is to propose for each of as many sequences."""
        return self._worth(num_decodes) if self._proposes else 0

    def _worth(self, num_decodes: int) -> int:
        """How many for each of as many sequences would pay if they were good."""
        if num_decodes not in self._wanted:
            a, b = self._costs.relative()
            k = np.arange(min(self._most, self._max_drafts // max(num_decodes, 1)) + 1)
            expected = np.cumsum(_HOPE**k) * num_decodes
            self._wanted[num_decodes] = int(np.argmax(expected / (a + b * num_decodes * (1 + k))))
        return self._wanted[num_decodes]

    def choose(self, budget: int, prompts_wait: bool) -> None:
        """Says of each sequence how many drafts its next step computes (`RunningRows.drafts`). `budget`: tokens of the
        step, of which drafts take what nobody else would, and where there are prompts little of theirs."""
        rows = self._rows
        num_ready = int(np.count_nonzero(rows.ready))
        forced = self._take_forced() if self._most and rows.masked.any() and self._worth(num_ready) else []
        rows.proposing = bool(rows.proposed.any())
        if not rows.proposing:
            return
        places = np.flatnonzero(rows.ready & (rows.proposed > 0) & ~rows.alone)
        if not len(places):
            return
        counts = np.minimum(rows.proposed[places], rows.limits[places] - rows.known[places] - 1)
        hits, tries = rows.looks[places].T
        rates = (hits + _PRIOR_RATE * _PRIOR_TRIES) / (tries + _PRIOR_TRIES)
        rates[np.isin(places, forced)] = _FORCED_RATE
        room = max(budget - num_ready, 0)
        if prompts_wait or (rows.known - rows.computed)[rows.ready].max() > 1:
            room //= _PROMPTS_TO_DRAFTS
        rows.drafts[places] = self._best(counts, rates, num_ready, room)

    def _take_forced(self) -> list[int]:
        """What grammars say comes next is proposed, before anything else. Returns the rows."""
        rows, found = self._rows, []
        for seq in rows.owners[rows.masked & rows.ready & ~rows.alone].tolist():
            if seq.matcher is not None and self._may_draft(seq):
                with self._held.failures.isolate(seq):
                    tokens = seq.matcher.forced()[: self._most]
                    if tokens:
                        seq.drafts, rows.proposed[seq.row] = tokens, len(tokens)
                        found.append(seq.row)
        return found

    def _may_draft(self, seq: Sequence) -> bool:
        """All of its tokens have arrived, and no position's logits depend on how often those before it were sampled."""
        return not self._rows.in_flight(seq) and not seq.params.has_penalties

    def _best(self, counts: np.ndarray, rates: np.ndarray, num_decodes: int, room: int) -> np.ndarray:
        """Drafts of each: tokens that are expected of a step, over its cost, are most with them."""
        k = np.arange(1, self._most + 1)
        gains = np.where(k <= counts[:, None], rates[:, None] ** k, 0.0)
        order = np.argsort(-gains, axis=None, kind="stable")[: min(self._max_drafts, room)]
        sizes = np.arange(len(order) + 1)
        a, b = self._costs.relative()
        expected = num_decodes + np.concatenate(([0.0], np.cumsum(gains.ravel()[order])))
        taken = order[: int(np.argmax(expected / (a + b * (num_decodes + sizes))))]
        return np.bincount(taken // self._most, minlength=len(counts))

    def observe(self, step: PlannedStep, seconds: float) -> None:
        """What it took, where all of its tokens sample."""
        if not self._proposes and not step.masked:
            return
        num_tokens = step.rows.num_tokens
        if num_tokens == int(step.rows.samples.sum()):
            self._costs.observe(num_tokens, seconds)
            self._age += 1
            if self._age % 64 == 0:
                self._wanted.clear()

    def learn(self, seq: Sequence, accepted: int) -> None:
        """So many of the drafts that the sequence has computed were right."""
        self.drafted += len(seq.drafts)
        self.accepted += accepted
        for position in range(accepted):
            self.accepted_at[position] += 1
        if seq.row >= 0:
            self._look(seq.row, accepted, min(accepted + 1, len(seq.drafts)))
        seq.drafts = []

    def _look(self, row: int, hits: int, tries: int) -> None:
        looks = self._rows.looks[row]
        looks += (hits, tries)
        if looks[1] > _REMEMBERED_TRIES:
            looks *= 0.5

    def take(self, step: PlannedStep, result: StepResult) -> None:
        """What the device proposes behind the tokens that a step has brought; stale where a later step is planned."""
        if not len(result.drafts):
            return
        rows, owners = self._rows, dict(zip(step.rows.row.tolist(), step.owners.tolist(), strict=True))
        for row, tokens in result.drafts.each():
            seq = owners.get(row)
            if seq is None or rows.owners[row] is not seq or not self._may_draft(seq):
                continue
            if seq.drafts:  # not computed, but now it is known whether the first was right
                self._look(row, seq.drafts[0] == seq.tokens[-1], 1)
            rows.proposed[row], seq.drafts = len(tokens), tokens
