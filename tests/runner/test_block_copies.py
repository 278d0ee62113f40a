"""Batches of block copies: in order they do what one copy after the other does, whatever the order inside of each."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from engine.runner.block_copies import independent

PAIRS = st.lists(st.tuples(st.integers(0, 6), st.integers(0, 6)).filter(lambda pair: pair[0] != pair[1]), max_size=12)


@given(pairs=PAIRS, data=st.data())
def test_any_order_within_a_batch_gives_what_copying_in_order_gives(
    pairs: list[tuple[int, int]], data: st.DataObject
) -> None:
    want, got = list(range(7)), list(range(7))
    for source, destination in pairs:
        want[destination] = want[source]
    batches = list(independent(pairs))
    assert [pair for batch in batches for pair in batch] == pairs
    for batch in batches:
        for source, destination in data.draw(st.permutations(batch)):
            got[destination] = got[source]
    assert got == want


def test_copies_that_do_not_meet_are_one_batch() -> None:
    pairs = [(0, 1), (0, 2), (3, 4)]
    assert list(independent(pairs)) == [pairs]
    assert list(independent([])) == []
    assert list(independent([(0, 1), (2, 0)])) == [[(0, 1)], [(2, 0)]]
