"""How many drafts each sequence computes in the next step: as many as are likely to make tokens cheaper.

A draft costs a position of the step, and brings a token if it and all before it are right. What a position costs is
learnt from steps (`StepCosts`), how likely a sequence's drafts are right from those that were looked at. Those with the
best chances are taken while the expected tokens per second rise.
"""

from __future__ import annotations

import numpy as np

from engine.lookup import continuation
from engine.scheduling.holdings import Holdings
from engine.scheduling.sequence import Sequence
from engine.speculation_config import SpeculationConfig
from engine.step_costs import StepCosts

_PRIOR_RATE, _PRIOR_TRIES = 0.7, 2.0
"""how often a draft is right, before any was looked at, and how many looks that is worth"""
_REMEMBERED_TRIES = 32.0
_AGES = 0.98
"""with every step: who has no drafts because they were wrong tries again some day"""
_HOPE = 0.95
"""drafts are thought of at all where ones that are right as often would pay"""
_PROMPTS_TO_DRAFTS = 8
"""where there are prompts, drafts may take one in as many tokens of what they would have"""
_PAUSE = 3
"""steps for which nothing is looked for where nothing was found"""
_LOOKED_UP, _MOST_LOOKUPS = 4096, 8
"""what the host looks up for rows with a grammar: in so many tokens, for as many rows of a step"""
_FORCED_RATE = 0.98
"""what a grammar forces is nearly always what is sampled; it might be spelled in other tokens"""


class Speculation:
    def __init__(self, held: Holdings, config: SpeculationConfig, max_drafts: int, costs: StepCosts) -> None:
        """`max_drafts`: of one step."""
        self._held, self._rows = held, held.rows
        self._config = config
        self._most = config.num_speculative_tokens
        self._proposes = config.method is not None
        self._max_drafts = max_drafts
        self._costs = costs
        self.drafts = self.drafted = self.accepted = 0
        """since the start"""
        self.accepted_at = [0] * config.num_speculative_tokens
        """drafts that were right, by their position"""

    def choose(self, budget: int, prompts_wait: bool) -> None:
        """Says of each sequence how many drafts its next step computes (`RunningRows.drafts`). `budget`: tokens of the
        step, of which drafts take what nobody else would, and where there are prompts little of theirs."""
        rows = self._rows
        if not self._most or not (self._proposes or rows.masked.any()):
            return
        rows.drafts[:] = 0
        num_ready = int(np.count_nonzero(rows.ready))
        if not num_ready or not self._are_worth(num_ready):
            return
        rows.looks *= _AGES
        np.maximum(rows.pause - 1, 0, out=rows.pause)
        may = rows.ready & ~rows.alone
        known, forced = self._known_to_host(may)
        counts = np.where(may & ~rows.masked & (rows.pause <= 0), self._most if self._proposes else 0, known)
        counts = np.minimum(counts, rows.limits - rows.known - 1)
        places = np.flatnonzero(counts > 0)
        if not len(places):
            return
        hits, tries = rows.looks[places].T
        rates = (hits + _PRIOR_RATE * _PRIOR_TRIES) / (tries + _PRIOR_TRIES)
        rates[forced[places]] = _FORCED_RATE
        room = max(budget - num_ready, 0)
        if prompts_wait or (rows.known - rows.computed)[rows.ready].max() > 1:
            room //= _PROMPTS_TO_DRAFTS
        rows.drafts[places] = self._best(counts[places], rates, num_ready, room)

    def _are_worth(self, num_decodes: int) -> bool:
        """Whether a draft for each of as many sequences would pay if it were good."""
        a, b = self._costs.relative()
        return (1 + _HOPE) * (a + b * num_decodes) > a + b * 2 * num_decodes

    def _known_to_host(self, may: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Those of rows with a grammar, whose masks the host makes before the device has proposed: what it forces, or
        else what came after the same tokens, from behind the tokens in flight on, which are thought to be the first
        ones. How many each row has, and whether they are forced."""
        rows, config, left = self._rows, self._config, _MOST_LOOKUPS
        counts, forced = np.zeros(len(may), dtype=np.int32), np.zeros(len(may), dtype=bool)
        for seq in rows.owners[rows.masked & may].tolist():
            with self._held.failures.isolate(seq):
                first = rows.in_flight(seq)
                drafts = seq.matcher.forced()
                forced[seq.row] = bool(drafts)
                if not drafts and self._proposes and left and rows.pause[seq.row] <= 0:
                    left, bounds = left - 1, (config.prompt_lookup_max, config.prompt_lookup_min)
                    drafts = continuation(seq.tokens[-_LOOKED_UP:], *bounds, first + self._most)
                    rows.pause[seq.row] = 0 if drafts else _PAUSE
                seq.drafts = drafts[first : first + self._most]
                counts[seq.row] = len(seq.drafts)
        return counts, forced

    def _best(self, counts: np.ndarray, rates: np.ndarray, num_decodes: int, room: int) -> np.ndarray:
        """Drafts of each: tokens that are expected of a step, over its cost, are most with them."""
        k = np.arange(1, self._most + 1)
        gains = np.where(k <= counts[:, None], rates[:, None] ** k, 0.0)
        most = min(self._max_drafts, room, gains.size)
        order = np.argpartition(-gains, max(most - 1, 0), axis=None)[:most]
        order = order[np.lexsort((order, -gains.ravel()[order]))]
        sizes = np.arange(len(order) + 1)
        a, b = self._costs.relative()
        expected = num_decodes + np.concatenate(([0.0], np.cumsum(gains.ravel()[order])))
        taken = order[: int(np.argmax(expected / (a + b * (num_decodes + sizes))))]
        return np.bincount(taken // self._most, minlength=len(counts))

    def learn(self, seq: Sequence, accepted: int, drafted: int) -> None:
        """So many of the drafts that the sequence has computed were right."""
        self.drafts += drafted > 0
        self.drafted += drafted
        self.accepted += accepted
        self.accepted_at[:accepted] = [count + 1 for count in self.accepted_at[:accepted]]
        if seq.row >= 0:
            looks = self._rows.looks[seq.row]
            looks += (accepted, min(accepted + 1, drafted))
            self._rows.pause[seq.row] = 0 if drafted else _PAUSE
            if looks[1] > _REMEMBERED_TRIES:
                looks *= 0.5
