"""Beam search over token candidates: which beams go on, with which token, and which sequences are finished.

Semantics are those of transformers' `generate(num_beams=...)`, so that sequences and scores agree. Knows tokens and
log-probabilities only; who runs the beams keeps their KV.
"""

from __future__ import annotations

from collections.abc import Sequence as Tokens
from heapq import nlargest
from typing import NamedTuple

from engine.core.wire import BeamParams

Candidates = Tokens[tuple[int, float]]
"""(token, log-probability), most likely first"""


class Choice(NamedTuple):
    """One beam of the next step: which beam it continues, and the token that it appends."""

    parent: int
    token: int


class Hypothesis(NamedTuple):
    """A finished sequence."""

    score: float
    """sum of log-probabilities / length ** length_penalty"""
    logprob: float
    token_ids: list[int]
    """what was generated, a stop token included"""
    stopped: bool
    """ended by a stop token, not by the limit"""


class BeamSearch:
    """The search of one prompt. `advance` until it returns None, then take `finished`."""

    def __init__(self, params: BeamParams, stop_token_ids: frozenset[int], max_new_tokens: int) -> None:
        self._params = params
        self._stop = stop_token_ids
        self._limit = max_new_tokens
        self._length = 0
        self._scores = [0.0]
        self.finished: list[Hypothesis] = []
        """at most `width`, best first"""

    @property
    def num_candidates(self) -> int:
        """Candidates that each beam must bring: with all stop tokens among them, enough are left to go on."""
        return candidates_of(self._params.width, len(self._stop))

    def advance(self, candidates: Tokens[Candidates], generated: Tokens[list[int]]) -> list[Choice] | None:
        """`candidates[i]`, `generated[i]`: of beam i, in the order of the last choices (at first one beam). None: the
        search is over."""
        width = self._params.width
        self._length += 1
        at_limit = self._length >= self._limit
        # (score, -beam, -rank): of equals the earlier beam and the likelier token
        pool = nlargest(
            self.num_candidates,
            (
                (self._scores[beam] + logprob, -beam, -rank, token)
                for beam, found in enumerate(candidates)
                for rank, (token, logprob) in enumerate(found)
            ),
        )
        self._finish(
            [
                (score, [*generated[-beam], token])
                for score, beam, _, token in pool[:width]
                if at_limit or token in self._stop
            ]
        )
        going_on = [] if at_limit else [entry for entry in pool if entry[3] not in self._stop][:width]
        if not going_on or self._is_over(going_on[0][0]):
            return None
        self._scores = [score for score, *_ in going_on]
        return [Choice(-beam, token) for _, beam, _, token in going_on]

    def _finish(self, ended: list[tuple[float, list[int]]]) -> None:
        penalty = self._length**self._params.length_penalty
        found = [Hypothesis(logprob / penalty, logprob, ids, ids[-1] in self._stop) for logprob, ids in ended]
        merged = sorted([*self.finished, *found], key=lambda one: -one.score)  # stable: of equals the earlier one
        self.finished = merged[: self._params.width]

    def _is_over(self, best_running: float) -> bool:
        """All places are taken, and by the rule of `early_stopping` no running beam will take one."""
        if len(self.finished) < self._params.width:
            return False
        if self._params.early_stopping is True:
            return True
        longest = self._params.early_stopping == "never" and self._params.length_penalty > 0
        length = self._limit if longest else self._length
        best: float = best_running / length**self._params.length_penalty
        return best <= self.finished[-1].score


def candidates_of(width: int, num_stop_tokens: int) -> int:
    return max(2, 1 + num_stop_tokens) * width
