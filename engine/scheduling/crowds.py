"""Where the policy is fair: what a tenant sends faster than it is served, its crowd, starts at the pace at which its
answers end. A step that is filled up with its prompts takes two or three times as long as one of decodes, and who comes
meanwhile waits for all of it. The crowd gains nothing by it: it waits for rows and blocks, not for steps, and prompts
beside decodes in every step cost less than all of them in some (Agrawal et al., "Sarathi-Serve", OSDI 2024)."""

from __future__ import annotations

from collections.abc import Iterable

from engine.scheduling.fair_queue import FairQueue
from engine.scheduling.holdings import urgency
from engine.scheduling.prompt_shares import LEAST, prompt_shares
from engine.scheduling.sequence import Sequence
from engine.scheduling.steps_in_flight import PlannedStep

_MEMORY = 0.95
"""weight of the past in the running mean: some twenty steps"""
_MOST_TIMES = 1.5
"""the mean that a step may have: a mean that is too low grows until it is not"""
_LEAST_BESIDE = 32
"""such a part of a step is for crowds beside prompts of others, so that those that are half-way go on"""


class Crowds:
    """How many tokens of prompts of crowds a step may have, beside sequences that decode."""

    def __init__(self, queue: FairQueue | None, budget: int) -> None:
        """`queue`: of the policy `fair`; None: no tenant has a crowd. `budget`: tokens of a step."""
        self._queue, self._budget = queue, budget
        self._mean = 0.0
        """tokens of prompts in a step that samples"""
        self.left = budget
        """for crowds, of the step that is drafted"""

    def has(self, seq: Sequence) -> bool:
        """It is of one: more of its tenant's prompts waits beside it than a step computes."""
        return self._queue is not None and self._queue.behind(seq) > self._budget

    def begin(self, decodes: bool, needs: Iterable[tuple[Sequence, int]]) -> None:
        """A step is drafted, in which some decode, or not. `needs`: prompts that are to share it, and what of them."""
        self.left = self._budget
        if decodes:
            others = sum(tokens for seq, tokens in needs if not self.has(seq))
            self.left = max(int(_MOST_TIMES * self._mean), self._budget // LEAST) - others
            self.left = max(self.left, self._budget // _LEAST_BESIDE, 1)

    def shares(self, sequences: list[Sequence], tokens: list[int], smallest: int) -> list[int]:
        """Of the tokens that each needs, the most urgent first, what it may have: those of crowds have it."""
        members = [index for index, seq in enumerate(sequences) if self.has(seq)]
        if members:
            needs = [(urgency(sequences[index]), tokens[index]) for index in members]
            for index, share in zip(members, prompt_shares(needs, self.left, smallest), strict=True):
                tokens[index] = share
                self.left -= share
        return tokens

    def allowed(self, seq: Sequence, tokens: int) -> int:
        """What it may have of so many that it needs."""
        return min(tokens, self.left) if self.has(seq) else tokens

    def take(self, seq: Sequence, tokens: int) -> int:
        """The same: it has them."""
        tokens = self.allowed(seq, tokens)
        self.left -= tokens if self.has(seq) else 0
        return tokens

    def planned(self, step: PlannedStep) -> None:
        """What became of it."""
        rows = step.rows
        if self._queue is not None and rows.samples.any():
            prompt_tokens = int(rows.query_lens[rows.query_lens != rows.samples].sum())
            self._mean = _MEMORY * self._mean + (1 - _MEMORY) * prompt_tokens
