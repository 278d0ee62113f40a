"""Random tables for what looks for drafts, and the definition of what it is to find, written out."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch

from engine.runner.kernels.ngram import DraftKernels
from engine.runner.kernels.ngram_host import END, MOST_MATCHES
from engine.speculation_config import SpeculationConfig

STALE = 1
"""what stands in the table behind what is known; a token that matches others"""


@dataclass(frozen=True)
class Case:
    tokens: torch.Tensor
    rows: torch.Tensor
    lengths: torch.Tensor
    most: torch.Tensor
    longest: int
    shortest: int

    def own(self, row: int) -> list[int]:
        return self.tokens[row, : int(self.lengths[row])].tolist()


def random_case(rng: np.random.Generator, num_rows: int = 9, columns: int = 90) -> Case:
    """Few different tokens, so that matches abound; rows that are empty, full, periodic or without a match."""
    tokens = np.full((num_rows, columns), STALE, np.int32)
    lengths = rng.integers(0, columns + 1, num_rows)
    lengths[rng.random(num_rows) < 0.3] = rng.choice([0, 1, 2, 3, columns - 1, columns])
    for row, n in enumerate(lengths):
        own = rng.integers(0, rng.choice([1, 2, 3, 50]), n)
        if rng.random() < 0.4:
            own = np.resize(own[: rng.integers(1, 12)], n)
        tokens[row, :n] = own
    shortest, longest = sorted(rng.integers(1, rng.choice([3, 8, 70]), 2).tolist())
    rows = rng.permutation(num_rows)[: rng.integers(0, num_rows + 1)]
    return Case(
        tokens=torch.from_numpy(tokens),
        rows=torch.from_numpy(rows),
        lengths=torch.from_numpy(lengths.astype(np.int32)),
        most=torch.from_numpy(rng.choice([0, 1, 2, 7, 64, 100], len(rows)).astype(np.int32)),
        longest=longest,
        shortest=shortest,
    )


def expected_ngram(own: Sequence[int], longest: int, shortest: int, most: int) -> list[int]:
    own = list(own)
    for length in range(min(longest, len(own) - 1), shortest - 1, -1):
        for end in range(len(own) - 2, length - 2, -1):
            if own[end - length + 1 : end + 1] == own[-length:]:
                behind = own[end + 1 :]
                return [behind[index % len(behind)] for index in range(most)]
    return []


def expected_suffix(outputs: Sequence[list[int]], own: list[int], config: SpeculationConfig, most: int) -> list[int]:
    """Outputs that have ended, and the row's own tokens, as texts of which none goes on in another."""
    texts = [*([*output, END] for output in outputs), own]
    places: list[tuple[list[int], int]] = []
    length = min(config.suffix_decoding_max_tree_depth, len(own))
    while length and not places:
        for text in texts:
            until = len(text) - (text is own)
            ends = [end for end in range(length, until + 1) if text[end - length : end] == own[-length:]]
            places += [(text, end) for end in ends if end < len(text)]
        length -= not places
    places = places[-MOST_MATCHES:]
    drafts: list[int] = []
    likely = 1.0
    while places and len(drafts) < min(most, int(length * config.suffix_decoding_max_spec_factor)):
        following = [text[end] for text, end in places]
        best = min(following, key=lambda token: (-following.count(token), token))
        likely *= following.count(best) / len(following)
        if best == END or likely < config.suffix_decoding_min_token_prob:
            break
        drafts.append(best)
        places = [(text, end + 1) for text, end in places if text[end] == best and end + 1 < len(text)]
    return drafts


def check_ngram(kernels: DraftKernels, case: Case, device: torch.device | None = None) -> int:
    """All of the table is compared: nothing is written but drafts. Returns how many there were. `device`: the CPU
    unless given."""
    want, counts = case.tokens.clone(), []
    for row, most in zip(case.rows.tolist(), case.most.tolist()):
        n = int(case.lengths[row])
        drafts = expected_ngram(case.own(row), case.longest, case.shortest, min(most, want.shape[1] - n))
        want[row, n : n + len(drafts)] = torch.tensor(drafts, dtype=torch.int32)
        counts.append(len(drafts))
    tokens, rows, lengths, most = (
        values.clone().to(device) for values in (case.tokens, case.rows, case.lengths, case.most)
    )
    found = kernels.propose_ngram(tokens, rows, lengths, most, case.longest, case.shortest)
    assert found.dtype == torch.int32 and found.tolist() == counts
    assert torch.equal(tokens.cpu(), want)
    return sum(counts)
