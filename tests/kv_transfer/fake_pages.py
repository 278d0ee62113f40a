"""Caches of two engines without a model."""

from __future__ import annotations

import numpy as np

from engine.kv_transfer.memory import KVMemory, Pages

PARTS = (24, 40, 13)
"""bytes of a block in each cache; one of them is odd"""


LAYOUT = {"weights": "one", "block_size": "16"}


def memory(seed: int, num_blocks: int = 32, parts: tuple[int, ...] = PARTS, **layout: str) -> KVMemory:
    random = np.random.default_rng(seed)
    device, host = (
        Pages([random.integers(0, 255, (num_blocks, size), dtype=np.uint8) for size in parts]) for _ in range(2)
    )
    return KVMemory(device, host, {**LAYOUT, **layout})


def packed(pages: Pages, blocks: list[int]) -> bytes:
    into = np.empty(len(blocks) * pages.page_bytes, dtype=np.uint8)
    pages.pack(blocks, into)
    return into.tobytes()
