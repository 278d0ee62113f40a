"""Sending without waiting: what the other end has no room for now is refused, or is kept until it has."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable

import zmq

from engine.errors import QueueFullError


class Outbox:
    """Of a socket that is connected, so that only a full queue can refuse. From any thread."""

    def __init__(
        self,
        socket: zmq.Socket[bytes],
        full: str,
        sent: Callable[[], None] = lambda: None,
        not_sent: Callable[[], None] = lambda: None,
    ) -> None:
        """`full`: what whoever is refused is told. `sent` is called before each try, for the other end may answer at
        once, and `not_sent` behind one that found no room."""
        self._socket, self._full, self._sent, self._not_sent = socket, full, sent, not_sent
        self._lock = threading.Lock()
        self._kept: deque[bytes] = deque()

    def send(self, frame: bytes, *, refusable: bool) -> None:
        """Behind what is kept. Raises `QueueFullError` for what is `refusable`, which is not sent then; what is not (it
        ends something that was sent) arrives."""
        with self._lock:
            if self._send_kept() and self._try(frame):
                return
            if refusable:
                raise QueueFullError(self._full)
            if frame not in self._kept:
                self._kept.append(frame)

    def flush(self) -> None:
        """What is kept, as far as there is room now."""
        if self._kept:
            with self._lock:
                self._send_kept()

    def _send_kept(self) -> bool:
        while self._kept and self._try(self._kept[0]):
            self._kept.popleft()
        return not self._kept

    def _try(self, frame: bytes) -> bool:
        self._sent()
        try:
            self._socket.send(frame, zmq.NOBLOCK)
        except zmq.Again:
            self._not_sent()
            return False
        return True
