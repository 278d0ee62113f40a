"""Masks from the host: only what they allow is ever sampled, in whatever way it is applied."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from engine.sampling.grammar_masks import forbidden_by_device, forbidden_by_host, restrict


def bits_of(allowed: np.ndarray) -> np.ndarray:
    rows, vocab_size = allowed.shape
    words = np.zeros((rows, -(-vocab_size // 32)), dtype=np.uint32)
    for row, token in zip(*np.nonzero(allowed), strict=True):
        words[row, token // 32] |= np.uint32(1 << (token % 32))
    return words.view(np.int32)


@given(st.integers(1, 5), st.sampled_from([1, 31, 32, 33, 100, 513]), st.integers(0, 2**32 - 1))
def test_host_and_device_read_the_same_bits(rows: int, vocab_size: int, seed: int) -> None:
    allowed = np.random.default_rng(seed).random((rows, vocab_size)) < 0.4
    bits = bits_of(allowed)
    expected = torch.from_numpy(~allowed)
    assert torch.equal(forbidden_by_host(bits, vocab_size), expected)
    assert torch.equal(forbidden_by_device(torch.from_numpy(bits.reshape(-1)), rows, vocab_size), expected)


@pytest.mark.parametrize("places", [[0, 1, 2, 3], [1, 3], [2]])
def test_rows_without_a_grammar_keep_their_logits(places: list[int]) -> None:
    logits = torch.randn(4, 70, generator=torch.Generator().manual_seed(1))
    before, allowed = logits.clone(), np.random.default_rng(2).random((len(places), 70)) < 0.5
    restrict(logits, places, bits_of(allowed))
    for place in range(4):
        if place not in places:
            assert torch.equal(logits[place], before[place])
            continue
        may = torch.from_numpy(allowed[places.index(place)])
        assert torch.equal(logits[place][may], before[place][may])
        assert bool((logits[place][~may] == float("-inf")).all())
