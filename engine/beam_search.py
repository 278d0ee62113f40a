"""Beam search over token candidates: which beams go on, with which token, and which sequences are finished.

Semantics are those of transformers' `generate(num_beams=...)`, so that sequences and scores agree. Knows tokens and
log-probabilities only; who runs the beams keeps their KV.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Callable
from collections.abc import Sequence as Tokens
from heapq import heapify, heappop, heapreplace
from typing import NamedTuple

from engine.core.wire import BeamParams, candidates_of
from engine.step import TokenLogprobs

Choice = tuple[int, int]
"""one beam of the next step: which beam it continues, and the token that it appends"""


class Hypothesis(NamedTuple):
    """A finished sequence."""

    rank: float
    """larger is better: see `rank_of`"""
    logprob: float
    length: int
    penalty: float
    token_ids: list[int]
    """what was generated, a stop token included"""
    stopped: bool
    """ended by a stop token, not by the limit"""

    @property
    def score(self) -> float:
        """logprob / length ** penalty; what no float can hold becomes the nearest that one can"""
        if self.logprob >= 0.0:
            return self.logprob
        exponent = math.log(-self.logprob) - self.penalty * math.log(self.length)
        return -math.exp(exponent) if exponent < _LARGEST_EXPONENT else -sys.float_info.max


_LARGEST_EXPONENT = math.log(sys.float_info.max)


def rank_of(logprob: float, length: int, penalty: float) -> float:
    """Orders sequences as their scores, logprob / length ** penalty, do, where neither the power nor the quotient is a
    number that a float can hold: minus the logarithm of minus the score, for log-probabilities are at most 0."""
    return penalty * math.log(length) - math.log(-logprob) if logprob < 0.0 else math.inf


class BeamSearch:
    """The search of one prompt. `advance` until it returns None, then take `finished`."""

    def __init__(self, params: BeamParams, stop_token_ids: frozenset[int], max_new_tokens: int) -> None:
        self._params = params
        self.stop_token_ids = stop_token_ids
        self.limit = max_new_tokens
        self.length = 0
        """tokens generated"""
        self.scores = [0.0]
        """of the beams that go on: sums of log-probabilities"""
        self.finished: list[Hypothesis] = []
        """at most `width`, best first"""

    @property
    def num_candidates(self) -> int:
        """Candidates that each beam must bring: with all stop tokens among them, enough are left to go on."""
        return candidates_of(self._params.width, len(self.stop_token_ids))

    def advance(self, candidates: Tokens[TokenLogprobs], generated: Callable[[int], list[int]]) -> list[Choice] | None:
        """`candidates[i]` (but its first entry), `generated(i)`: of beam i, in the order of the last choices (at first
        one beam). None: the search is over."""
        width = self._params.width
        self.length += 1
        at_limit = self.length >= self.limit
        # Merge what the beams bring, best first; of equals the earlier beam and the likelier token.
        scores = self.scores
        heap = [(-scores[beam] - found.logprobs[1], beam, 1) for beam, found in enumerate(candidates)]
        heapify(heap)
        going_on: list[Choice] = []
        going_scores: list[float] = []
        ended = []
        for place in range(self.num_candidates):
            if not heap or len(going_on) == width:
                break
            negative, beam, rank = heap[0]
            found = candidates[beam]
            token = found.token_ids[rank]
            if at_limit or token in self.stop_token_ids:
                if place < width:
                    ended.append((-negative, [*generated(beam), token]))
            else:
                going_on.append((beam, token))
                going_scores.append(-negative)
            rank += 1
            if rank < len(found.logprobs):
                heapreplace(heap, (-scores[beam] - found.logprobs[rank], beam, rank))
            else:
                heappop(heap)
        if ended:
            self._finish(ended)
        if not going_on or (len(self.finished) == width and self._is_over(going_scores[0])):
            return None
        self.scores = going_scores
        return going_on

    def _finish(self, ended: list[tuple[float, list[int]]]) -> None:
        length, penalty = self.length, self._params.length_penalty
        found = [
            Hypothesis(rank_of(logprob, length, penalty), logprob, length, penalty, ids, ids[-1] in self.stop_token_ids)
            for logprob, ids in ended
        ]
        merged = sorted([*self.finished, *found], key=lambda one: -one.rank)  # stable: of equals the earlier one
        self.finished = merged[: self._params.width]

    def _is_over(self, best_running: float) -> bool:
        """By the rule of `early_stopping` no running beam will take one of the places, which are taken all."""
        if self._params.early_stopping is True:
            return True
        longest = self._params.early_stopping == "never" and self._params.length_penalty > 0
        length = self.limit if longest else self.length
        return rank_of(best_running, length, self._params.length_penalty) <= self.finished[-1].rank
