"""States on their way from a stage to the next one: what both ends do, and how they do it on one host.

There, states lie in slots of memory without a name, which both map; a socket between the two says what lies where, and
gives slots back. Who waits sleeps in the kernel; a socket that was shut down wakes both.
"""

from __future__ import annotations

import contextlib
import mmap
import os
import socket
import struct
from typing import NamedTuple, Protocol

import torch

from engine.errors import EngineError

_PAGE = 4096
_TAG = struct.Struct("=qqq")
"""step, rows, bytes of a row"""
_FREE = b"f"
GONE = "a stage that computes before or behind this one has gone"


class StateLink(Protocol):
    """One end of a link. States are [rows, columns] of one dtype; both ends say the same."""

    def send(self, step_id: int, states: torch.Tensor) -> None:
        """May wait until the next stage has taken earlier ones. Raises EngineError where it has gone."""
        ...

    def receive(self, step_id: int, rows: int) -> torch.Tensor:
        """[rows, columns] of that step, until the next call. Raises EngineError where the stage before has gone, or
        sent other ones."""
        ...


class LinkEnd(Protocol):
    """Descriptors of one end, which the caller keeps."""

    def open(self, slots: int, most_rows: int, columns: int, dtype: torch.dtype) -> StateLink:
        """`slots`: steps that the stage before may be ahead, where the link says how many."""
        ...


class SharedEnd(NamedTuple):
    """See `LinkEnd`."""

    memory: int
    socket: int

    def open(self, slots: int, most_rows: int, columns: int, dtype: torch.dtype) -> StateLink:
        return SharedLink(self, slots, most_rows, columns, dtype)


class StageLinks:
    """The links between `stages` stages, made by who starts their processes and keeps all descriptors, so that it can
    wake everybody."""

    def __init__(self, stages: int) -> None:
        self._memories: list[int] = []
        self._sockets: list[tuple[socket.socket, socket.socket]] = []
        try:
            for _ in range(stages - 1):
                self._memories.append(os.memfd_create("pageloom-states", os.MFD_CLOEXEC))
                self._sockets.append(socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET))
        except BaseException:
            self.close()
            raise

    def before(self, stage: int) -> SharedEnd | None:
        """What a stage receives from; None: it is the first."""
        return SharedEnd(self._memories[stage - 1], self._sockets[stage - 1][1].fileno()) if stage else None

    def after(self, stage: int) -> SharedEnd | None:
        """What it sends to; None: it is the last."""
        if stage == len(self._memories):
            return None
        return SharedEnd(self._memories[stage], self._sockets[stage][0].fileno())

    def abort(self) -> None:
        """From any thread: who waits at any link, or will, gets an error."""
        for pair in self._sockets:
            for each in pair:
                _shut_down(each)

    def close(self) -> None:
        for pair in self._sockets:
            for each in pair:
                each.close()
        for memory in self._memories:
            os.close(memory)
        self._memories, self._sockets = [], []


class SharedLink:
    """A `StateLink`, of descriptors that the caller keeps."""

    def __init__(self, end: SharedEnd, slots: int, most_rows: int, columns: int, dtype: torch.dtype) -> None:
        self._socket = socket.socket(fileno=os.dup(end.socket))
        row_bytes = columns * dtype.itemsize
        slot_bytes = -(-most_rows * row_bytes // _PAGE) * _PAGE
        os.ftruncate(end.memory, slots * slot_bytes)
        self._memory = mmap.mmap(end.memory, slots * slot_bytes)
        places = [
            torch.frombuffer(self._memory, dtype=dtype, count=most_rows * columns, offset=i * slot_bytes)
            for i in range(slots)
        ]
        self._slots = [place.view(most_rows, columns) for place in places]
        self._row_bytes = row_bytes
        self._free = slots
        self._next = 0
        self._received = torch.empty(most_rows, columns, dtype=dtype)

    def send(self, step_id: int, states: torch.Tensor) -> None:
        while not self._free:
            if self._wait() != _FREE:
                raise EngineError("a stage said something else than that it has taken states")
            self._free += 1
        rows = len(states)
        self._slots[self._next][:rows] = states
        self._next = (self._next + 1) % len(self._slots)
        self._free -= 1
        self._tell(tag_of(step_id, rows, self._row_bytes))
        self._take_back()

    def receive(self, step_id: int, rows: int) -> torch.Tensor:
        check_tag(self._wait(), step_id, rows, self._row_bytes)
        states = self._received[:rows]
        states.copy_(self._slots[self._next][:rows])
        self._next = (self._next + 1) % len(self._slots)
        self._tell(_FREE)
        return states

    def __del__(self) -> None:
        self._socket.close()

    def _wait(self) -> bytes:
        try:
            data = self._socket.recv(_TAG.size)
        except OSError:
            data = b""
        if not data:
            raise EngineError(GONE)
        return data

    def _take_back(self) -> None:
        """Slots that are free, as far as it is known: the socket must not fill up."""
        try:
            while self._free < len(self._slots) and self._socket.recv(_TAG.size, socket.MSG_DONTWAIT) == _FREE:
                self._free += 1
        except OSError:
            pass  # none is; or the link is down, and the next call says so

    def _tell(self, message: bytes) -> None:
        try:
            self._socket.send(message, socket.MSG_NOSIGNAL)
        except OSError as error:
            raise EngineError(GONE) from error


def tag_of(step_id: int, rows: int, row_bytes: int) -> bytes:
    """What goes before states."""
    return _TAG.pack(step_id, rows, row_bytes)


def check_tag(tag: bytes, step_id: int, rows: int, row_bytes: int) -> None:
    """Raises EngineError where it is not that of the states which are waited for."""
    found = _TAG.unpack(tag) if len(tag) == _TAG.size else None
    if found != (step_id, rows, row_bytes):
        sent = "what is no tag" if found is None else f"{found[1]} of step {found[0]} (of {found[2]} bytes)"
        raise EngineError(
            f"a stage waits for {rows} states of step {step_id} (of {row_bytes} bytes), and the one before it sent "
            f"{sent}"
        )


def _shut_down(link: socket.socket) -> None:
    with contextlib.suppress(OSError):  # it is, already
        link.shutdown(socket.SHUT_RDWR)
