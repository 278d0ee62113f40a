"""Collectives of processes on several hosts, over a socket to each (`csrc/`; the protocol is in README.md)."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from engine.parallel.native_group import NativeGroup, load_library


class SocketGroup(NativeGroup):
    """As `SharedGroup`: the same bits, errors and operators.

    `sockets`: descriptors of connected stream sockets by rank, which are the group's from then on; -1 at this rank's
    own place. A rank that loses another one gives whoever watches the processes three seconds to abort the group with
    the cause, and then says itself whom it has lost. Raises BuildError; RuntimeError where the sockets are not so.
    """

    def __init__(self, sockets: Sequence[int], name: str, rank: int, cache_dir: Path) -> None:
        ops = load_library(cache_dir)
        super().__init__(ops, ops.open_socket_group(list(sockets), name, rank), name, rank, len(sockets))
