"""Memory that two processes see: here, that two mappings of one descriptor do."""

from __future__ import annotations

import os

import numpy as np
from fake_pages import packed

from engine.kv_transfer.memory import Pages
from engine.kv_transfer.rank_caches import share, shared_caches


def test_what_a_rank_writes_is_read_by_another_one_and_no_cache_overlaps_another() -> None:
    descriptor = share()
    try:
        mine, theirs = (shared_caches(descriptor, [48, 5000], 7, 3) for _ in range(2))
    finally:
        os.close(descriptor)
    assert [[part.shape for part in tier] for tier in mine] == [[(7, 48), (7, 5000)], [(3, 48), (3, 5000)]]
    assert not any(part.any() for tier in mine for part in tier)
    written = [part for tier in mine for part in tier]
    for number, part in enumerate(written, 1):
        part[:] = number
    for number, part in enumerate((part for tier in theirs for part in tier), 1):
        assert (part == number).all()
    assert packed(Pages(theirs[0]), [6]) == packed(Pages(mine[0]), [6]) == bytes([1] * 48 + [2] * 5000)
    Pages(theirs[1]).unpack([2], np.full(5048, 9, dtype=np.uint8))
    assert (mine[1][1][2] == 9).all() and (mine[1][1][:2] == 4).all()


def test_without_a_host_tier_there_is_none() -> None:
    descriptor = share()
    try:
        device, host = shared_caches(descriptor, [16], 4, 0)
    finally:
        os.close(descriptor)
    assert [part.shape for part in device] == [(4, 16)] and host == []
