"""Prompts side by side: every step is as full as it can be, and each of the most urgent ones gets on."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from engine.scheduling.prompt_shares import prompt_shares


@given(
    needs=st.lists(st.tuples(st.integers(0, 2), st.integers(1, 500)), max_size=8).map(
        lambda needs: sorted(needs, key=lambda one: one[0])
    ),
    budget=st.integers(0, 1000),
    smallest=st.integers(1, 300),
)
def test_shares_fill_the_budget_and_nobody_gets_more_than_it_needs(
    needs: list[tuple[int, int]], budget: int, smallest: int
) -> None:
    shares = prompt_shares(needs, budget, smallest)
    assert sum(shares) == min(budget, sum(need for _, need in needs))
    assert all(0 <= share <= need for share, (_, need) in zip(shares, needs, strict=True))
    others = sum(need for priority, need in needs if priority != needs[0][0])
    left = budget - min(budget // 8, others)
    assert sum(shares) >= budget or all(share == need for share, (_, need) in zip(shares, needs, strict=True))
    assert sum(s for s, (priority, _) in zip(shares, needs, strict=True) if priority != needs[0][0]) >= budget - left
    for share, (priority, need) in zip(shares, needs, strict=True):
        if priority == needs[0][0]:
            assert share >= min(need, left // 2)
        left -= share


@pytest.mark.parametrize(
    ("needs", "budget", "shares"),
    [
        ([(0, 8000)], 1024, [1024]),
        ([(0, 8000), (0, 37)], 1024, [987, 37]),
        ([(0, 8000), (0, 8000), (0, 8000)], 1024, [512, 256, 256]),
        ([(0, 100), (0, 100), (0, 100)], 256, [100, 100, 56]),
        ([(0, 600), (1, 600)], 1024, [600, 424]),
        ([(0, 2000), (1, 100), (1, 600)], 1024, [896, 100, 28]),
        ([], 5, []),
    ],
)
def test_examples(needs: list[tuple[int, int]], budget: int, shares: list[int]) -> None:
    assert prompt_shares(needs, budget, 256) == shares
