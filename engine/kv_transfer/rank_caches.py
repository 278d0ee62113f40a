"""Caches of ranks that are processes of one host: in memory that rank 0 reads and writes, too, so that a page is moved
as a whole, by one process, whoever computes which part of it."""

from __future__ import annotations

import mmap
import os
from collections.abc import Sequence

import numpy as np


def share() -> int:
    """The descriptor of what a rank keeps its caches in; empty so far, and the caller's."""
    return os.memfd_create("pageloom-kv-caches", os.MFD_CLOEXEC)


def shared_caches(
    descriptor: int, block_bytes: Sequence[int], num_blocks: int, num_host_blocks: int
) -> tuple[list[np.ndarray], list[np.ndarray]]:
    """uint8 [blocks, bytes of a block] of each cache on the device and in the host tier, zeroed: the same memory in
    every process that asks with the same numbers."""
    shapes = [(count, size) for count in (num_blocks, num_host_blocks) for size in block_bytes if count]
    starts = [0]
    for count, size in shapes:
        starts.append(starts[-1] + -(-count * size // mmap.PAGESIZE) * mmap.PAGESIZE)
    os.ftruncate(descriptor, starts[-1])
    memory = np.frombuffer(mmap.mmap(descriptor, starts[-1]), dtype=np.uint8)
    caches = [
        memory[start : start + count * size].reshape(count, size)
        for start, (count, size) in zip(starts, shapes, strict=False)
    ]
    return caches[: len(block_bytes)], caches[len(block_bytes) :]
