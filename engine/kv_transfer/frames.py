"""What two engines say to each other: frames of a bounded length, msgpack, never pickles.

    reader                                  source
    Ask{engine, lease, layout, keys}  ──►   on one host with a memfd, to which the pages are written
                                      ◄──   Answer{error}, or Answer{size, checksum}
                                      ◄──   by TCP the pages, behind it; by NIXL the reader reads them where it says
    Took                              ──►   the lease is over

A reader that leaves before `Took` leaves the lease as it was, for another try. An `Ask` without keys gives it back.
"""

from __future__ import annotations

import os
import select
import socket
import struct
import time
from typing import Annotated, TypeVar

import msgspec
import numpy as np

MAX_FRAME_BYTES = 4 << 20
MAX_METADATA_BYTES = 64 << 10
"""of a NIXL agent and one region; some hundred as a rule"""
_LENGTH = struct.Struct("<I")
_CREDENTIALS = struct.Struct("iII")
"""process, user, group"""

MAX_KEYS = 1 << 17
"""of one prompt: two million tokens in blocks of sixteen"""
_Key = Annotated[bytes, msgspec.Meta(max_length=64)]
_Name = Annotated[str, msgspec.Meta(max_length=512)]
_Fact = Annotated[str, msgspec.Meta(max_length=4096)]

T = TypeVar("T")


class TransferError(Exception):
    """Why pages do not come, in words."""


class RefusedError(TransferError):
    """What the reader is told."""


class Ask(msgspec.Struct, frozen=True, tag="ask"):
    engine_id: _Name
    lease: _Name
    layout: Annotated[dict[_Fact, _Fact], msgspec.Meta(max_length=32)]
    keys: Annotated[list[_Key], msgspec.Meta(max_length=MAX_KEYS)]
    nixl: bool = False
    """it reads them itself"""


class Answer(msgspec.Struct, frozen=True, omit_defaults=True, tag="answer"):
    error: str | None = None
    size: int = 0
    checksum: bytes = b""
    metadata: Annotated[bytes, msgspec.Meta(max_length=MAX_METADATA_BYTES)] = b""
    """of the source's NIXL agent, and the region that the pages lie in"""
    address: Annotated[int, msgspec.Meta(ge=0)] = 0


class Took(msgspec.Struct, frozen=True, tag="took"):
    pass


class Wire:
    """One end of a connection, with a deadline for all that is said on it. Raises `TransferError`."""

    def __init__(self, connection: socket.socket, deadline: float) -> None:
        """`deadline`: on `time.monotonic`'s clock."""
        self.socket, self._deadline = connection, deadline

    def until(self, deadline: float) -> None:
        """What comes now may take until then."""
        self._deadline = deadline

    def send(self, message: msgspec.Struct, descriptor: int | None = None) -> None:
        data = msgspec.msgpack.encode(message)
        framed = _LENGTH.pack(len(data)) + data
        try:
            self._arm()
            if descriptor is None:
                self.socket.sendall(framed)
            else:
                sent = socket.send_fds(self.socket, [framed], [descriptor])
                if sent < len(framed):  # else the other side may have left already, content
                    self.socket.sendall(framed[sent:])
        except OSError as error:
            raise TransferError(_words(error)) from error

    def send_pages(self, pages: np.ndarray) -> None:
        rest = memoryview(pages.data)
        try:
            while rest:
                self._arm()
                rest = rest[self.socket.send(rest) :]
        except OSError as error:
            raise TransferError(_words(error)) from error

    def is_readable(self, wait_s: float) -> bool:
        """Whether something has come; else it waits so long."""
        self._arm()
        poll = select.poll()
        poll.register(self.socket, select.POLLIN)
        if poll.poll(0):
            return True
        time.sleep(wait_s)  # poll's own timeout is whole milliseconds
        return False

    def receive(self, kind: type[T]) -> T:
        return self._receive(kind, None)

    def receive_with(self, kind: type[T], descriptors: list[int]) -> T:
        """A descriptor that comes with it is put into the list, and is its owner's; one at most, so that nobody fills
        a process with them."""
        return self._receive(kind, descriptors)

    def receive_pages(self, into: np.ndarray) -> None:
        rest = memoryview(into.data)
        try:
            while rest:
                self._arm()
                count = self.socket.recv_into(rest)
                if not count:
                    raise TransferError("the other side has left")
                rest = rest[count:]
        except OSError as error:
            raise TransferError(_words(error)) from error

    def _receive(self, kind: type[T], descriptors: list[int] | None) -> T:
        (length,) = _LENGTH.unpack(self._exactly(_LENGTH.size, descriptors))
        if length > MAX_FRAME_BYTES:
            raise TransferError(f"a frame of {length} bytes, where {MAX_FRAME_BYTES} are allowed")
        try:
            return msgspec.msgpack.decode(self._exactly(length, descriptors), type=kind)
        except msgspec.MsgspecError as error:
            raise TransferError(f"a frame that does not decode: {error}") from error

    def _exactly(self, count: int, descriptors: list[int] | None) -> bytes:
        got = bytearray()
        try:
            while len(got) < count:
                self._arm()
                if descriptors is None:
                    data = self.socket.recv(min(count - len(got), 1 << 20))
                else:
                    data, new, _, _ = socket.recv_fds(self.socket, min(count - len(got), 1 << 20), 1)
                    descriptors += new
                    if len(descriptors) > 1:
                        raise TransferError("more than one descriptor with a message")
                if not data:
                    raise TransferError("the other side has left")
                got += data
        except OSError as error:
            raise TransferError(_words(error)) from error
        return bytes(got)

    def _arm(self) -> None:
        left = self._deadline - time.monotonic()
        if left <= 0:
            raise TransferError("it took too long")
        self.socket.settimeout(left)


def _words(error: OSError) -> str:
    return "it took too long" if isinstance(error, TimeoutError) else str(error)


def is_of_this_user(connection: socket.socket) -> bool:
    """Whether the process at the other end of a Unix socket runs as this one does: abstract names are anybody's to
    connect to, and to take."""
    _, user, _ = _CREDENTIALS.unpack(connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size))
    return bool(user == os.geteuid())


def local_name(port: int) -> str:
    """Of the abstract Unix socket beside a TCP port: found by whoever shares its network namespace."""
    return f"\0pageloom-kv-{port}"
