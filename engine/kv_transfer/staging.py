"""Memory that pages pass through, used again: what is touched for the first time costs more than the copy."""

from __future__ import annotations

import fcntl
import mmap
import os
import threading
from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np

from engine.kv_transfer.frames import RefusedError

_SEALS = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL
_GRAIN = 1 << 22


class Staging:
    """Shared memory that its owner reads and whoever has its descriptor writes to. Sealed, so that neither can pull it
    away from under the other."""

    def __init__(self, size: int) -> None:
        size = -(-size // _GRAIN) * _GRAIN
        self.descriptor = os.memfd_create("pageloom-kv", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        os.ftruncate(self.descriptor, size)
        fcntl.fcntl(self.descriptor, fcntl.F_ADD_SEALS, _SEALS)
        mapped = mmap.mmap(self.descriptor, size, flags=mmap.MAP_SHARED | mmap.MAP_POPULATE)
        self.bytes: np.ndarray = np.frombuffer(mapped, dtype=np.uint8)

    def close(self) -> None:
        """The memory goes with the last reference to `bytes`."""
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


class Stagings:
    """One for each source at a time: none sees what came from another."""

    def __init__(self, most: int) -> None:
        """`most`: that are kept while nobody uses them; the longest unused go first."""
        self._most = most
        self._idle: list[tuple[str, Staging]] = []
        self._lock = threading.Lock()

    @contextmanager
    def of(self, source: str, size: int) -> Iterator[Staging]:
        with self._lock:
            found = [each for each in self._idle if each[0] == source]
            if found:
                self._idle.remove(found[-1])
        staging = found[-1][1] if found else None
        if staging is not None and staging.bytes.size < size:
            staging.close()
            staging = None
        staging = staging or Staging(size)
        try:
            yield staging
        except BaseException:
            staging.close()  # somebody may still write to it
            raise
        with self._lock:
            self._idle.append((source, staging))
            gone = self._idle[: -self._most]
            del self._idle[: -self._most]
        for _, each in gone:
            each.close()

    def close(self) -> None:
        with self._lock:
            for _, each in self._idle:
                each.close()
            self._idle.clear()


class Scratch:
    """Private memory, for as many at once as ask for it."""

    def __init__(self, most: int) -> None:
        """`most`: that are kept while nobody uses them."""
        self._most = most
        self._idle: list[np.ndarray] = []
        self._lock = threading.Lock()

    @contextmanager
    def of(self, size: int) -> Iterator[np.ndarray]:
        with self._lock:
            memory = self._idle.pop() if self._idle else None
        if memory is None or memory.size < size:
            memory = np.empty(-(-size // _GRAIN) * _GRAIN, dtype=np.uint8)
        try:
            yield memory[:size]
        finally:
            with self._lock:
                if len(self._idle) < self._most:
                    self._idle.append(memory)
