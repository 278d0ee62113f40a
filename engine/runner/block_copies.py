"""Copies of blocks within one cache, in batches that one launch may do in any order."""

from __future__ import annotations

from collections.abc import Iterator, Sequence


def independent(pairs: Sequence[tuple[int, int]]) -> Iterator[list[tuple[int, int]]]:
    """Cut (source, destination) pairs, which are to have the effect of one copy after the other, into runs within which
    no block is written and read, or written twice. One run, unless a block was given back and handed out again within a
    plan."""
    batch: list[tuple[int, int]] = []
    read: set[int] = set()
    written: set[int] = set()
    for source, destination in pairs:
        if source in written or destination in read or destination in written:
            yield batch
            batch, read, written = [], set(), set()
        batch.append((source, destination))
        read.add(source)
        written.add(destination)
    if batch:
        yield batch
