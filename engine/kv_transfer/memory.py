"""A CPU's KV cache as bytes: pages by their block, of the device and of the host tier."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from engine.kv_transfer.layout import Layout


class Pages:
    """A page is one block in every part of a cache. Packed, all blocks of the first part come before those of the
    second, so that each part is moved at once."""

    def __init__(self, parts: Sequence[np.ndarray]) -> None:
        """`parts`: uint8 [blocks, bytes of a block], of each cache tensor; no copies."""
        self.parts = list(parts)
        self.page_bytes = sum(int(part.shape[1]) for part in self.parts)

    def pack(self, blocks: Sequence[int], into: np.ndarray) -> None:
        """`into`: uint8 [len(blocks) * page_bytes]."""
        index = np.asarray(blocks, dtype=np.intp)
        for part, packed in zip(self.parts, self._views(into, len(blocks)), strict=True):
            np.take(part, index, axis=0, out=packed, mode="clip")

    def unpack(self, blocks: Sequence[int], packed: np.ndarray) -> None:
        """As `pack`, the other way; blocks that follow each other at once."""
        ends = [index for index in range(1, len(blocks)) if blocks[index] != blocks[index - 1] + 1]
        runs = list(zip([0, *ends], [*ends, len(blocks)], strict=True))
        for part, rows in zip(self.parts, self._views(packed, len(blocks)), strict=True):
            for start, end in runs:
                part[blocks[start] : blocks[start] + end - start] = rows[start:end]

    def checksum(self, packed: np.ndarray, count: int) -> bytes:
        """Of `count` pages: sums of each block in each part. Tells what is torn or missing, not who meant harm."""
        sums = [_sums(rows) for rows in self._views(packed, count)]
        return b"".join(each.tobytes() for each in sums)

    def _views(self, packed: np.ndarray, count: int) -> list[np.ndarray]:
        views, start = [], 0
        for part in self.parts:
            size = part.shape[1]
            views.append(packed[start : start + count * size].reshape(count, size))
            start += count * size
        return views


class KVMemory:
    """What a transfer reads and writes; whoever uses it knows which blocks nobody else writes to."""

    def __init__(self, device: Pages, host: Pages, layout: Layout) -> None:
        """`layout`: what the bytes of a page mean."""
        self.device, self.host, self.layout = device, host, layout


def _sums(rows: np.ndarray) -> np.ndarray:
    """uint64 [rows]."""
    words = rows.view(np.uint64) if rows.shape[1] % 8 == 0 and rows.ctypes.data % 8 == 0 else rows
    sums: np.ndarray = words.sum(axis=1, dtype=np.uint64)
    return sums
