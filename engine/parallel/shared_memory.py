"""Collectives of processes on one host, through memory that they share (`csrc/`; the protocol is in README.md)."""

from __future__ import annotations

import fcntl
import os
import struct
from pathlib import Path

from engine.limits import MAX_RANKS
from engine.parallel.native_group import NativeGroup, load_library

_MAGIC = b"plgroup1"
_PAGE = 4096


def allocate(size: int, slot_bytes: int) -> int:
    """The memory of one group of `size` ranks, each of which has two slots of `slot_bytes` (rounded up to pages), as
    the descriptor of a file without a name: it is gone when no process has it open or mapped.

    The caller closes it; workers inherit it (`subprocess.Popen(pass_fds=...)`). Each rank can be taken once: ranks
    that begin anew need a new memory. Raises ValueError; OSError where there is no memory.
    """
    if not 1 <= size <= MAX_RANKS or slot_bytes < 1:
        raise ValueError(f"a group has 1 to {MAX_RANKS} ranks and slots of bytes, not {size} ranks, {slot_bytes} bytes")
    slot = -(-slot_bytes // _PAGE) * _PAGE
    fd = os.memfd_create("pageloom-group", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    try:
        os.ftruncate(fd, _PAGE + size * (_PAGE + 2 * slot))
        os.pwrite(fd, struct.pack("=8sQQ", _MAGIC, size, slot), 0)
        fcntl.fcntl(fd, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL)
    except OSError:
        os.close(fd)
        raise
    return fd


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
