"""Memory that pages pass through, used again: what is touched for the first time costs more than the copy."""

from __future__ import annotations

import fcntl
import mmap
import os
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Generic, Protocol, TypeVar

import numpy as np

from engine.kv_transfer.frames import RefusedError

_SEALS = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL
_GRAIN = 1 << 22


class Memory(Protocol):
    bytes: np.ndarray
    """uint8, of the size that was asked for or more"""

    def close(self) -> None:
        """The memory goes with the last reference to `bytes`."""
        ...


M = TypeVar("M", bound=Memory)


class Private:
    """What nobody else sees."""

    def __init__(self, size: int) -> None:
        self.bytes: np.ndarray = np.empty(size, dtype=np.uint8)

    def close(self) -> None:
        pass


class Staging:
    """Shared memory that its owner reads and whoever has its descriptor writes to. Sealed, so that neither can pull it
    away from under the other."""

    def __init__(self, size: int) -> None:
        self.descriptor = os.memfd_create("pageloom-kv", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        os.ftruncate(self.descriptor, size)
        fcntl.fcntl(self.descriptor, fcntl.F_ADD_SEALS, _SEALS)
        mapped = mmap.mmap(self.descriptor, size, flags=mmap.MAP_SHARED | mmap.MAP_POPULATE)
        self.bytes: np.ndarray = np.frombuffer(mapped, dtype=np.uint8)

    def close(self) -> None:
        os.close(self.descriptor)


@contextmanager
def mapped(descriptor: int, size: int) -> Iterator[np.ndarray]:
    """Of a `Staging` of another process. Raises `RefusedError` where it is none, or too small."""
    try:
        sealed = fcntl.fcntl(descriptor, fcntl.F_GET_SEALS) & fcntl.F_SEAL_SHRINK
        if not sealed or os.fstat(descriptor).st_size < size:
            raise RefusedError("the reader's memory is too small, or may be cut")
        memory = mmap.mmap(descriptor, size, flags=mmap.MAP_SHARED | mmap.MAP_POPULATE)
    except OSError as error:
        raise RefusedError(f"the reader's memory cannot be written to: {error}") from error
    yield np.frombuffer(memory, dtype=np.uint8)


class Stagings(Generic[M]):
    """One for each user at a time: readers give the source's name, so that none sees what came from another."""

    def __init__(self, most: int, make: Callable[[int], M]) -> None:
        """`most`: that are kept while nobody uses them; the longest unused go first. `make`: one of so many bytes."""
        self._most, self._make = most, make
        self._idle: list[tuple[str, M]] = []
        self._lock = threading.Lock()

    @contextmanager
    def of(self, user: str, size: int) -> Iterator[M]:
        with self._lock:
            found = [each for each in self._idle if each[0] == user]
            if found:
                self._idle.remove(found[-1])
        memory = found[-1][1] if found else None
        if memory is not None and memory.bytes.size < size:
            memory.close()
            memory = None
        memory = memory or self._make(-(-size // _GRAIN) * _GRAIN)
        try:
            yield memory
        except BaseException:
            memory.close()  # somebody may still read it, or write to it
            raise
        with self._lock:
            self._idle.append((user, memory))
            gone = self._idle[: max(len(self._idle) - self._most, 0)]
            del self._idle[: len(gone)]
        for _, each in gone:
            each.close()

    def close(self) -> None:
        """What is in use is closed when it is given back."""
        with self._lock:
            self._most = 0
            for _, each in self._idle:
                each.close()
            self._idle.clear()
