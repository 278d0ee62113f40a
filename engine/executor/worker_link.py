"""The driver's end of the stream to a rank: frames to it, messages from it, whatever host it runs on."""

from __future__ import annotations

import socket
import threading
from collections import deque
from typing import Protocol

from engine.executor.frames import FrameBuffer, Message, decode_message

_READ_BYTES = 1 << 16


class WorkerLink:
    """`send` is for the executor's thread, all else for the thread that watches (`worker_watch`)."""

    def __init__(self, stream: socket.socket) -> None:
        self.socket = stream
        self.socket.setblocking(False)
        self.hears = True
        """it is open on the other side"""
        self._frames = FrameBuffer()
        self._backlog: deque[memoryview] = deque()
        """what the socket did not take: a worker that computes does not read"""
        self._lock = threading.Lock()

    def send(self, frame: bytes) -> bool:
        """Never waits. False: some of it is left for `flush`. Whether the worker has gone is told elsewhere."""
        with self._lock:
            if self.hears:
                self._backlog.append(memoryview(frame))
                self._send_backlog()
            return not self._backlog

    def flush(self) -> None:
        """The socket takes bytes again."""
        with self._lock:
            self._send_backlog()

    @property
    def has_backlog(self) -> bool:
        return bool(self._backlog)

    def _send_backlog(self) -> None:
        while self._backlog:
            first = self._backlog[0]
            try:
                sent = self.socket.send(first)
            except BlockingIOError:
                return
            except OSError:  # it has gone
                self._backlog.clear()
                self.hears = False
                return
            if sent == len(first):
                self._backlog.popleft()
            else:
                self._backlog[0] = first[sent:]

    def receive(self) -> list[Message]:
        """What has come, without waiting."""
        while self.hears:
            try:
                data = self.socket.recv(_READ_BYTES)
            except BlockingIOError:
                break
            except OSError:
                data = b""
            if not data:
                self.hears = False
            self._frames.feed(data)
        messages: list[Message] = []
        while (frame := self._frames.next()) is not None:
            messages.append(decode_message(frame))
        return messages

    def close(self) -> None:
        with self._lock:
            self.hears = False
            self._backlog.clear()
            self.socket.close()


class Handle(Protocol):
    """The driver's grip on the process of one rank."""

    rank: int
    pid: int
    link: WorkerLink
    stopped_looks: int
    """how often in a row it was seen stopped"""

    @property
    def name(self) -> str: ...

    @property
    def sentinel(self) -> int:
        """A descriptor that is readable when the process has ended, or something else is told of it."""
        ...

    def has_ended(self) -> bool:
        """After the sentinel was readable."""
        ...

    def is_stopped(self) -> bool:
        """By a signal."""
        ...

    def kill(self) -> None: ...

    def reap(self) -> str:
        """Wait for the end, free everything; why it has ended, in a line."""
        ...
