"""The memory of a group of ranks on one host (`csrc/shared_memory.h` says how it is laid out). Torch-free."""

from __future__ import annotations

import fcntl
import os
import struct

from engine.limits import MAX_RANKS

SLOT_BYTES = 1 << 20
"""of what a rank tells the others at once; more goes in parts"""
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
