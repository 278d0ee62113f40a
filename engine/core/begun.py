"""Which requests a core has begun to compute, or to prepare, written where its death loses nothing: who dies of a step
cannot tell any more what it was of."""

from __future__ import annotations

import logging
import os
from collections.abc import Iterable
from contextlib import suppress
from hashlib import blake2b

logger = logging.getLogger(__name__)

MOST = 1 << 16
"""that are remembered, the last ones"""
_BYTES = 8
_NAME = "begun"


class BegunLog:
    """The core's side. It is a file in the kernel's cache: nothing waits for a disk, and where there is no room on it,
    nothing is known."""

    def __init__(self, directory: str) -> None:
        self._path = os.path.join(directory, _NAME)
        self._fd: int | None = os.open(self._path, os.O_CREAT | os.O_WRONLY | os.O_CLOEXEC, 0o600)
        self._count = 0

    def add(self, request_id: str) -> None:
        """Before the step is submitted, or what the request needs is compiled, loaded or fetched."""
        if self._fd is None:
            return
        try:
            os.pwrite(self._fd, _digest(request_id), self._count % MOST * _BYTES)
        except OSError as error:
            logger.warning(
                "%s cannot be written (%s): if this core dies, all that it has are suspects", self._path, error
            )
            os.close(self._fd)
            self._fd = None
            with suppress(OSError):
                os.unlink(self._path)
        self._count += 1


class Begun:
    """What has been written, as whoever started the core reads it. None: nothing is known."""

    def __init__(self, directory: str | None) -> None:
        self._known: frozenset[bytes] | None = None
        if directory is None:
            return
        try:
            with open(os.path.join(directory, _NAME), "rb") as file:
                written = file.read(MOST * _BYTES)
        except OSError:  # it never served, its directory is gone, or so many files are open
            return
        self._known = frozenset(written[at : at + _BYTES] for at in range(0, len(written), _BYTES))

    def has_any(self, request_ids: Iterable[str]) -> bool:
        """As far as is known; true where nothing is."""
        return self._known is None or any(_digest(each) in self._known for each in request_ids)


def _digest(request_id: str) -> bytes:
    return blake2b(request_id.encode(), digest_size=_BYTES).digest()
