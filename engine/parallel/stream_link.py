"""States on their way from a stage to the next one, on another host: a stream carries a tag and the states behind it.

Both ends are those of `stage_link`, with the same tags and errors; that the other one has gone is a `RankLostError`.
The kernel's buffers, some megabytes at each end, are how far the stage before may be ahead; who waits sleeps there.
"""

from __future__ import annotations

import os
import socket
from typing import NamedTuple

import torch

from engine.errors import RankLostError
from engine.parallel.stage_link import GONE, StateLink, check_tag, tag_of


class StreamEnd(NamedTuple):
    """See `LinkEnd`."""

    socket: int

    def open(self, slots: int, most_rows: int, columns: int, dtype: torch.dtype) -> StateLink:
        return StreamLink(self, most_rows, columns, dtype)


class StreamLink:
    """A `StateLink`, over a stream whose descriptor the caller keeps: who shuts it down wakes both ends."""

    def __init__(self, end: StreamEnd, most_rows: int, columns: int, dtype: torch.dtype) -> None:
        self._socket = socket.socket(fileno=os.dup(end.socket))
        self._row_bytes = columns * dtype.itemsize
        self._received = torch.empty(most_rows, columns, dtype=dtype)
        self._bytes = _bytes_of(self._received)
        self._tag = bytearray(len(tag_of(0, 0, 0)))

    def send(self, step_id: int, states: torch.Tensor) -> None:
        try:
            self._send(tag_of(step_id, len(states), self._row_bytes), _bytes_of(states.contiguous()))
        except OSError as error:
            raise RankLostError(f"{GONE}: {error}") from error

    def receive(self, step_id: int, rows: int) -> torch.Tensor:
        self._fill(memoryview(self._tag))
        check_tag(bytes(self._tag), step_id, rows, self._row_bytes)
        self._fill(self._bytes[: rows * self._row_bytes])
        return self._received[:rows]

    def __del__(self) -> None:
        self._socket.close()

    def _send(self, tag: bytes, states: memoryview) -> None:
        sent = self._socket.sendmsg([tag, states], [], socket.MSG_NOSIGNAL)
        if sent < len(tag):
            self._socket.sendall(tag[sent:], socket.MSG_NOSIGNAL)
        self._socket.sendall(states[max(sent - len(tag), 0) :], socket.MSG_NOSIGNAL)

    def _fill(self, wanted: memoryview) -> None:
        while wanted:
            try:
                came = self._socket.recv_into(wanted, flags=socket.MSG_WAITALL)
            except OSError as error:
                raise RankLostError(f"{GONE}: {error}") from error
            if not came:
                raise RankLostError(GONE)
            wanted = wanted[came:]


def _bytes_of(states: torch.Tensor) -> memoryview:
    return states.view(torch.uint8).numpy().reshape(-1).data
