"""Collectives of processes on one host, through memory that they share (`csrc/`; the protocol is in README.md)."""

from __future__ import annotations

from pathlib import Path

from engine.parallel.group_memory import allocate
from engine.parallel.native_group import NativeGroup, load_library

__all__ = ["SharedGroup", "abort", "allocate"]


def abort(fd: int, reason: str, cache_dir: Path) -> None:
    """As `Group.abort`, by a process that has the memory's descriptor and is no rank: one that watches the ranks."""
    load_library(cache_dir).stop_memory(fd, reason)


class SharedGroup(NativeGroup):
    """A rank of a group (see `Group`). One thread calls its collectives at a time.

    `name`: under which this process's operators find it, with a number where this process has another group of that
    name: a second engine. The descriptor is not needed after the constructor, which
    builds (once per machine, seconds) and loads the library. Raises BuildError; RuntimeError where the memory is not of
    `size` ranks, or the rank has been taken before.
    """

    def __init__(self, fd: int, name: str, rank: int, size: int, cache_dir: Path) -> None:
        ops = load_library(cache_dir)
        super().__init__(ops, ops.open_group(fd, name, rank, size), name, rank, size)
