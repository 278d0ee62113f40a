"""Where quotas are counted: in this process, or in memory that processes share which answer the same clients."""

from __future__ import annotations

import fcntl
import hashlib
import mmap
import os
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Protocol

from engine.errors import ConfigError
from engine.limits import MAX_FRONT_ENDS

COUNTS = 6
"""numbers of a client that all processes change"""
_NAME_BYTES = 16
_SLOT_BYTES = _NAME_BYTES + 8 * (COUNTS + MAX_FRONT_ENDS)
_SLOTS = 1 << 14
"""more than there may be keys: a name that has gone keeps one"""
MEMORY_BYTES = _SLOTS * _SLOT_BYTES


class Cells(Protocol):
    """Numbers, 0 in the beginning."""

    def __getitem__(self, place: int, /) -> float: ...
    def __setitem__(self, place: int, value: float, /) -> None: ...


class Counts(Protocol):
    """Of one client."""

    shared: Cells
    """`COUNTS` of them"""

    def alone(self) -> AbstractContextManager[object]:
        """Nobody else counts meanwhile."""
        ...

    @property
    def own(self) -> float:
        """What this process has of something; nobody else changes it."""
        ...

    @own.setter
    def own(self, value: float) -> None: ...

    @property
    def of_all(self) -> float:
        """And what all have of it together."""
        ...


class OwnCounts:
    """Where one process alone answers."""

    def __init__(self) -> None:
        self.shared: Cells = [0.0] * COUNTS
        self.own = 0.0

    def alone(self) -> AbstractContextManager[object]:
        return nullcontext()

    @property
    def of_all(self) -> float:
        return self.own


class SharedMemory:
    """Counts by clients' names, in a file that has no name. A process that dies drops its lock; what it had is nobody's
    when another one comes to its place. Zeros are a memory of which nobody has counted anything."""

    def __init__(self, descriptor: int, place: int) -> None:
        """`place`: among the processes that share it."""
        self._descriptor, self._place = descriptor, place
        self._memory = mmap.mmap(descriptor, MEMORY_BYTES)
        self._slots = memoryview(self._memory)
        with self.locked():
            for slot in range(_SLOTS):
                if self._name(slot) != bytes(_NAME_BYTES):
                    self._numbers(slot)[COUNTS + place] = 0.0

    def close(self) -> None:
        """What was counted stays."""
        self._slots.release()
        self._memory.close()

    @staticmethod
    def create() -> int:
        """Its descriptor."""
        descriptor = os.memfd_create("pageloom-quotas")
        os.truncate(descriptor, MEMORY_BYTES)
        return descriptor

    @contextmanager
    def locked(self) -> Iterator[None]:
        """Among processes: in each, one thread counts."""
        fcntl.lockf(self._descriptor, fcntl.LOCK_EX)
        try:
            yield
        finally:
            fcntl.lockf(self._descriptor, fcntl.LOCK_UN)

    def of(self, name: str) -> SharedCounts:
        """Raises `ConfigError` where there have been too many names."""
        digest = hashlib.sha256(name.encode()).digest()[:_NAME_BYTES]
        first = int.from_bytes(digest[:4], "little")
        with self.locked():
            for index in range(_SLOTS):
                slot = (first + index) % _SLOTS
                found = self._name(slot)
                if found == bytes(_NAME_BYTES):
                    self._slots[slot * _SLOT_BYTES : slot * _SLOT_BYTES + _NAME_BYTES] = digest
                if found in (digest, bytes(_NAME_BYTES)):
                    return SharedCounts(self, self._numbers(slot), self._place)
        raise ConfigError(f"--keys: {_SLOTS} names have come and gone, for which quotas are kept: start anew")

    def _name(self, slot: int) -> bytes:
        return bytes(self._slots[slot * _SLOT_BYTES : slot * _SLOT_BYTES + _NAME_BYTES])

    def _numbers(self, slot: int) -> memoryview[float]:
        return self._slots[slot * _SLOT_BYTES + _NAME_BYTES : (slot + 1) * _SLOT_BYTES].cast("d")


class SharedCounts:
    def __init__(self, memory: SharedMemory, numbers: memoryview[float], place: int) -> None:
        self.shared: Cells = numbers[:COUNTS]
        self._memory, self._each, self._place = memory, numbers[COUNTS:], place

    def alone(self) -> AbstractContextManager[object]:
        return self._memory.locked()

    @property
    def own(self) -> float:
        return self._each[self._place]

    @own.setter
    def own(self, value: float) -> None:
        self._each[self._place] = value

    @property
    def of_all(self) -> float:
        return sum(self._each)
