"""Token candidates of beams without a model.

How much beams share depends on how often one beam's children push out another beam. The model here: at every position
the next token's probabilities are a stick broken at random (Griffiths-Engen-McCloskey, `spread` its parameter): the
first token takes Beta(1, spread) of the stick, the next one as much of the rest. A small spread is a sure model: each
beam goes on with its first token, and beams that have parted stay apart. A large one is an unsure model: many
near-equal children, so the best parent's children fill all beams, and histories coalesce after a few tokens.

The spread falls with the position in the output, as spread / (1 + position / SURER_AFTER): what beam search writes
becomes repetitive, and the model ever surer of it (Holtzman et al., "The Curious Case of Neural Text Degeneration").
"""

from __future__ import annotations

import numpy as np

from engine.beam_search import BeamSearch
from engine.core.wire import BeamParams, candidates_of
from engine.step import StepPlan, TokenLogprobs

SPREAD = 1.0
"""at the first position: the likeliest token has 0.62 on average there"""
SURER_AFTER = 12
"""tokens; this and `SPREAD` were chosen so that beams of width 2 to 6 save about what they do in the paper (Fig. 15)"""
_POOL = 1 << 12
_SEARCHES = 8


class Candidates:
    """Draws for one beam after the other, the same ones in every run."""

    def __init__(self, width: int, spread: float = SPREAD, seed: int = 0) -> None:
        self._num = candidates_of(width, 0)
        self._spread = spread
        self._seed = seed
        self._pools: dict[int, list[TokenLogprobs]] = {}
        """by the halvings of the spread"""
        self._next = 0

    def take(self, position: int) -> TokenLogprobs:
        """For output token `position`: the likeliest token first, then all candidates, as the device answers."""
        self._next = (self._next + 1) % _POOL
        halvings = (1 + position // SURER_AFTER).bit_length() - 1
        if halvings not in self._pools:
            self._pools[halvings] = self._draw(halvings)
        return self._pools[halvings][self._next]

    def _draw(self, halvings: int) -> list[TokenLogprobs]:
        rng = np.random.default_rng([self._seed, self._num, halvings])
        sticks = rng.beta(1.0, self._spread / 2**halvings, size=(_POOL, self._num + 8))
        rest = np.cumprod(1 - sticks, axis=1)
        sticks[:, 1:] *= rest[:, :-1]
        likeliest = np.sort(sticks, axis=1)[:, ::-1][:, : self._num]
        # Far apart, not equal, where a probability is too small for a float.
        logprobs = np.log(np.maximum(likeliest, 1e-300)) - np.arange(self._num) * 1e-3
        ids = [0, *range(self._num)]
        return [TokenLogprobs(token_ids=ids, logprobs=[one[0], *one], rank=1) for one in logprobs.tolist()]


class BeamAnswers:
    """What the device would answer for the beams of a plan: it keeps each row's prompt length."""

    def __init__(self, candidates: Candidates) -> None:
        self._candidates = candidates
        self._prompt_len: dict[int, int] = {}

    def of(self, plan: StepPlan) -> dict[int, TokenLogprobs]:
        for new in plan.added:
            self._prompt_len[new.row] = new.prompt_len
        return {
            row.row: self._candidates.take(row.computed + row.query_len - self._prompt_len[row.row])
            for row in plan.rows.each()
            if row.samples
        }


def turnover(width: int, spread: float = SPREAD, steps: int = 256) -> float:
    """Share of the beams that take over another beam's history in a step: what a system without sharing must copy.
    Mean over searches of so many `steps`."""
    source = Candidates(width, spread)
    moved = 0
    for _ in range(_SEARCHES):
        search = BeamSearch(BeamParams(width=width), frozenset(), steps + 1)
        texts: list[list[int]] = [[]]
        for step in range(steps):
            choices = search.advance([source.take(step) for _ in texts], texts.__getitem__)
            assert choices is not None, "a search without stop tokens ended before its limit"
            moved += 0 if step == 0 else width - len({parent for parent, _ in choices})
            texts = [[] for _ in choices]
    return moved / _SEARCHES / (steps - 1) / width
