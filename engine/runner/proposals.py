"""Drafts from tokens that are there: what came after the same tokens earlier.

Every proposer looks for the longest end of a row's tokens that is somewhere before. Which tokens come does not depend
on what is proposed, only how many steps they take.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol

import numpy as np

from engine.config import SpeculationConfig
from engine.runner.request_table import RequestTable

_RECENT_TOKENS = 1 << 16
_MOST_MATCHES = 64
"""places with the same tokens before them that are looked at, the latest ones"""
_END = -1
"""no token: the end of an output"""


class Proposer(Protocol):
    def propose(self, rows: Sequence[int], most: Sequence[int]) -> Sequence[int]:
        """Write drafts behind what those rows know, at most so many of each, when a step starts that computes them.
        Returns how many there are."""
        ...

    def end(self, row: int) -> None:
        """The row is about to be given away."""
        ...


class NgramProposer:
    """From the row's own tokens alone: prompt lookup decoding (Saxena, 2023), with the longest match and, among equals,
    the latest. Where it ends in what it is compared with, it goes on periodically."""

    def __init__(self, config: SpeculationConfig, table: RequestTable) -> None:
        self._longest, self._shortest = config.prompt_lookup_max, config.prompt_lookup_min
        self._tokens, self._lengths = table.tokens.numpy(), table.lengths.numpy()

    def propose(self, rows: Sequence[int], most: Sequence[int]) -> list[int]:
        return [_write(self._tokens[row], self._lengths[row], self._find, k) for row, k in zip(rows, most)]

    def end(self, row: int) -> None:
        """Nothing is kept."""

    def _find(self, tokens: np.ndarray, most: int) -> np.ndarray:
        ends, length = _matches(tokens, self._longest)
        if length < self._shortest:
            return tokens[:0]
        end = int(ends[-1])
        drafts = tokens[end + 1 : end + 1 + most]
        return drafts if len(drafts) == most else np.resize(tokens[end + 1 :], most)


class SuffixProposer:
    """From the row's own tokens and from recent outputs of all rows: at each place the token that came most often after
    what is the same, while that is likely enough (suffix decoding, Oliaro et al., 2024, with a search in place of
    trees: the texts are small)."""

    def __init__(self, config: SpeculationConfig, table: RequestTable) -> None:
        self._longest = config.suffix_decoding_max_tree_depth
        self._factor = config.suffix_decoding_max_spec_factor
        self._least = config.suffix_decoding_min_token_prob
        self._recent = np.zeros(0, dtype=np.int32)
        self._tokens, self._lengths, self._prompt_len = table.tokens.numpy(), table.lengths.numpy(), table.prompt_len

    def propose(self, rows: Sequence[int], most: Sequence[int]) -> list[int]:
        return [_write(self._tokens[row], self._lengths[row], self._find, k) for row, k in zip(rows, most)]

    def end(self, row: int) -> None:
        output = self._tokens[row, self._prompt_len.get(row, 0) : self._lengths[row]]
        if len(output) > 1:
            self._recent = np.concatenate((self._recent, output, [np.int32(_END)]))[-_RECENT_TOKENS:]

    def _find(self, own: np.ndarray, most: int) -> np.ndarray:
        text = np.concatenate((self._recent, own))
        ends, length = _matches(text, min(self._longest, len(own)))
        places, likely, drafts = ends[-_MOST_MATCHES:] + 1, 1.0, []
        for _ in range(min(most, int(self._factor * length))):
            following = text[places]
            tokens, counts = np.unique(following, return_counts=True)
            best = int(np.argmax(counts))
            likely *= counts[best] / len(places)
            if tokens[best] == _END or likely < self._least:
                break
            drafts.append(tokens[best])
            places = places[following == tokens[best]] + 1
            places = places[places < len(text)]
            if not len(places):
                break
        return np.array(drafts, dtype=np.int32)


def _write(tokens: np.ndarray, length: int, find: Callable[[np.ndarray, int], np.ndarray], most: int) -> int:
    """Into a row of the table, behind what it knows."""
    drafts = find(tokens[:length], most)
    tokens[length : length + len(drafts)] = drafts
    return len(drafts)


def _matches(text: np.ndarray, longest: int) -> tuple[np.ndarray, int]:
    """Where the longest end of `text` that is somewhere before ends there, and its length, `longest` at most; 0:
    nowhere."""
    last = len(text) - 1
    ends, length = np.flatnonzero(text[:last] == text[last]), 0
    while len(ends):
        length += 1
        if length >= longest:
            break
        longer = ends[ends >= length]
        longer = longer[text[longer - length] == text[last - length]]
        if not len(longer):
            break
        ends = longer
    return ends, length


def proposer_of(config: SpeculationConfig, table: RequestTable) -> Proposer | None:
    if config.method is None:
        return None
    return NgramProposer(config, table) if config.method == "ngram" else SuffixProposer(config, table)
