"""Drafts from a row's own tokens against the definition, written out."""

from __future__ import annotations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from engine.config import SpeculationConfig
from engine.runner.proposals import NgramProposer, SuffixProposer


def expected(tokens: list[int], longest: int, shortest: int, most: int) -> list[int]:
    for length in range(min(longest, len(tokens) - 1), shortest - 1, -1):
        for end in range(len(tokens) - 2, length - 2, -1):
            if tokens[end - length + 1 : end + 1] == tokens[-length:]:
                behind = tokens[end + 1 :]
                return [behind[index % len(behind)] for index in range(most)]
    return []


@given(
    rows=st.lists(st.lists(st.integers(0, 2), min_size=1, max_size=30), min_size=1, max_size=4),
    bounds=st.tuples(st.integers(1, 6), st.integers(1, 6)),
    most=st.integers(1, 12),
)
def test_the_longest_and_latest_match_goes_on(rows: list[list[int]], bounds: tuple[int, int], most: int) -> None:
    shortest, longest = sorted(bounds)
    config = SpeculationConfig(method="ngram", prompt_lookup_min=shortest, prompt_lookup_max=longest)
    table = np.full((8, 40), 1, dtype=np.int32)  # stale tokens behind what is known
    numbers = [7 - index for index in range(len(rows))]
    for number, tokens in zip(numbers, rows):
        table[number, : len(tokens)] = tokens
    found = NgramProposer(config).propose(table, numbers, [len(tokens) for tokens in rows], most)
    drafts = {number: expected(tokens, longest, shortest, most) for number, tokens in zip(numbers, rows)}
    assert dict(found.each()) == {number: tokens for number, tokens in drafts.items() if tokens}


def expected_suffix(outputs: list[list[int]], own: list[int], config: SpeculationConfig, most: int) -> list[int]:
    """Outputs that have ended, and the row's own tokens, as texts of which none goes on in another."""
    texts = [*([*output, -1] for output in outputs if len(output) > 1), own]
    places: list[tuple[list[int], int]] = []
    length = min(config.suffix_decoding_max_tree_depth, len(own))
    while length and not places:
        for text in texts:
            until = len(text) - (text is own)
            ends = [end for end in range(length, until + 1) if text[end - length : end] == own[-length:]]
            places += [(text, end) for end in ends if end < len(text)]
        length -= not places
    drafts: list[int] = []
    likely = 1.0
    while places and len(drafts) < min(most, int(length * config.suffix_decoding_max_spec_factor)):
        following = [text[end] for text, end in places]
        best = min(following, key=lambda token: (-following.count(token), token))
        likely *= following.count(best) / len(following)
        if best == -1 or likely < config.suffix_decoding_min_token_prob:
            break
        drafts.append(best)
        places = [(text, end + 1) for text, end in places if text[end] == best and end + 1 < len(text)]
    return drafts


@given(
    outputs=st.lists(st.lists(st.integers(0, 2), min_size=1, max_size=12), max_size=3),
    own=st.lists(st.integers(0, 2), min_size=1, max_size=20),
    depth=st.integers(1, 6),
    factor=st.sampled_from([0.5, 1.0, 2.0]),
    least=st.sampled_from([0.0, 0.1, 0.4]),
    most=st.integers(1, 12),
)
def test_what_came_most_often_after_the_same_tokens(
    outputs: list[list[int]], own: list[int], depth: int, factor: float, least: float, most: int
) -> None:
    config = SpeculationConfig(
        method="suffix",
        suffix_decoding_max_tree_depth=depth,
        suffix_decoding_max_spec_factor=factor,
        suffix_decoding_min_token_prob=least,
    )
    proposer, table = SuffixProposer(config), np.full((2, 40), 1, dtype=np.int32)
    for output in outputs:  # each behind a prompt of two tokens, which is nobody's output
        table[0, 2 : 2 + len(output)] = output
        proposer.propose(table, [0], [2 + len(output)], most)
        proposer.end(table, 0, 2)
    table[1, : len(own)] = own
    found = proposer.propose(table, [1], [len(own)], most)
    tokens = expected_suffix(outputs, own, config, most)
    assert dict(found.each()) == ({1: tokens} if tokens else {})
