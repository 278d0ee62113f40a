"""Where the policy is fair: what a tenant sends faster than it is served, its crowd, starts at the pace at which its
answers end. A step that is filled up with its prompts takes two or three times as long as one of decodes, and who comes
meanwhile waits for all of it. The crowd gains nothing by it: it waits for rows or blocks, not for steps, and prompts
beside decodes in every step cost less than all of them in some (Agrawal et al., "Sarathi-Serve", OSDI 2024)."""

from __future__ import annotations

import math

import numpy as np

from engine.scheduling.accounts import Account
from engine.scheduling.holdings import Holdings
from engine.scheduling.prompt_shares import LEAST
from engine.scheduling.sequence import Sequence
from engine.scheduling.steps_in_flight import PlannedStep

_MEMORY = 0.95
"""weight of the past in the running mean: some twenty steps"""
_MOST_TIMES = 1.5
"""the mean that a step may have: a mean that is too low grows until it is not"""
_BETWEEN, _MOST_AT_ONCE = 16, 2
"""steps between two that crowds' decodes are left out of; so many one behind the other, if there were none before"""
_LEAST_BESIDE = 32
"""such a part of a step is for crowds beside prompts of others, so that those that are half-way go on"""


class Crowds:
    """How many tokens of prompts of crowds a step may have, beside sequences that decode."""

    def __init__(self, held: Holdings, budget: int) -> None:
        """`budget`: tokens of a step."""
        self._held, self._budget = held, budget
        self._mean = 0.0
        """tokens of prompts in a step that samples"""
        self._found: dict[tuple[Account, int], bool] = {}
        """of tenants' priorities, whether they are crowds in the step that is drafted"""
        self.left = budget
        """for all of them"""
        self.gave_way = False
        """in the step that is drafted"""
        self._ways = 0.0

    def begin(self) -> None:
        """Another step is drafted."""
        self._found.clear()
        self.left, self.gave_way = self._budget, False

    def make_way(
        self, first: Sequence | None, plain: np.ndarray, others: list[Sequence]
    ) -> tuple[np.ndarray, list[Sequence]]:
        """Rows and sequences of a step, now and then without those of crowds that decode: where a prompt of others is
        in it, or that of the `first` that waits, whose first token so comes sooner by what many rows take. Where memory
        bounds steps that costs throughput, so it is not done in each."""
        rows = self._held.rows
        if self._held.fair is None or self._ways < 1.0:
            return plain, others
        prompts = [seq for seq in others if rows.remaining(seq) > 1] + ([] if first is None else [first])
        if all(map(self.has, prompts)):
            return plain, others
        stays = np.array([not self.has(seq) for seq in rows.owners[plain].tolist()], dtype=bool)
        kept = [seq for seq in others if rows.remaining(seq) > 1 or not self.has(seq)]
        self.gave_way = len(kept) < len(others) or not stays.all()
        self._ways -= self.gave_way
        return plain[stays], kept

    def has(self, seq: Sequence) -> bool:
        """Of its tenant's prompts that are as urgent more wait than a step computes, and than there are rows or blocks
        for. The same for all of a step."""
        if self._held.fair is None or seq.account is None:
            return False
        key = seq.account, seq.key[0]
        if key not in self._found:
            count, tokens = self._held.fair.beside(seq)
            scarce = count > len(self._held.rows.free) or tokens > self._held.room * self._held.kv.block_size
            self._found[key] = scarce and tokens > self._budget
        return self._found[key]

    def hold(self, decodes: bool, others: int) -> None:
        """In this step some decode, or not, and prompts that are not of crowds need so many tokens."""
        if decodes or self.gave_way:
            pace = max(math.ceil(_MOST_TIMES * self._mean), self._budget // LEAST)
            self.left = max(pace - others, self._budget // _LEAST_BESIDE, 1)

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
        self._ways = min(self._ways + 1 / _BETWEEN, _MOST_AT_ONCE)
        if self._held.fair is not None and rows.samples.any():
            prompt_tokens = int(rows.query_lens[rows.query_lens != rows.samples].sum())
            self._mean = _MEMORY * self._mean + (1 - _MEMORY) * prompt_tokens
