"""A worker's way to the driver: frames that come, answers that go."""

from __future__ import annotations

import select
import socket
import threading
import time

from engine.executor.frames import Close, Frame, FrameBuffer, Kind, Message, decode_command, encode_message

_READ_BYTES = 1 << 18


class DriverLeftError(BaseException):
    """Its socket is closed: nobody is interested any more."""


class DriverLink:
    """The worker's end of the socket: `receive` is for one thread, `tell` for any."""

    def __init__(self, descriptor: int) -> None:
        self._socket = socket.socket(fileno=descriptor)
        self._frames = FrameBuffer()
        self._lock = threading.Lock()

    def fileno(self) -> int:
        return self._socket.fileno()

    def tell(self, message: Message) -> None:
        with self._lock:
            self._socket.sendall(encode_message(message))

    def next(self) -> Frame | None:
        """A frame that has been received already."""
        return self._frames.next()

    def receive(self) -> Frame:
        """Wait for the next frame. Raises `DriverLeftError`."""
        while (frame := self._frames.next()) is None:
            self.read()
        return frame

    def read(self) -> None:
        """Wait for bytes."""
        try:
            data = self._socket.recv(_READ_BYTES)
        except BlockingIOError:
            raise
        except OSError:  # reset, or its host is silent
            data = b""
        if not data:
            raise DriverLeftError
        self._frames.feed(data)

    def is_asked_to_leave(self, within_s: float) -> bool:
        """A `Close`, or the end, is among what has come, or comes in that time; all of that is dropped."""
        deadline = time.monotonic() + within_s
        while not self._drop():
            left = deadline - time.monotonic()
            if left <= 0:
                return False
            select.select([self._socket], [], [], left)
        return True

    def _drop(self) -> bool:
        try:
            self._socket.setblocking(False)
            while True:
                while (frame := self._frames.next()) is not None:
                    if frame.kind is Kind.MESSAGE and isinstance(decode_command(frame), Close):
                        return True
                self.read()
        except BlockingIOError:
            return False
        except DriverLeftError:
            return True
        finally:
            self._socket.setblocking(True)
