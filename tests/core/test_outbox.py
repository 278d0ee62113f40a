"""What is sent without waiting arrives in order; what may be refused is, where there is no room."""

from __future__ import annotations

from collections import deque

import pytest
import zmq
from hypothesis import given
from hypothesis import strategies as st

from engine.core.outbox import Outbox
from engine.errors import QueueFullError


class Socket:
    def __init__(self, room: int) -> None:
        self._room = room
        self.under_way: deque[bytes] = deque()

    def send(self, frame: bytes, flags: int) -> None:
        assert flags == zmq.NOBLOCK
        if len(self.under_way) >= self._room:
            raise zmq.Again
        self.under_way.append(frame)


@given(st.integers(1, 4), st.lists(st.sampled_from("rrkkttf"), max_size=60))
def test_nothing_is_lost_that_may_not_be_and_nobody_waits(room: int, events: list[str]) -> None:
    socket, wanted, arrived, tries = Socket(room), list[bytes](), list[bytes](), [0, 0]

    def count(place: int) -> None:
        tries[place] += 1

    outbox = Outbox(socket, "full up", lambda: count(0), lambda: count(1))  # type: ignore[arg-type]
    for number, event in enumerate(events):
        frame = f"{event}{number}".encode()
        if event == "r":
            full = len(wanted) - len(arrived) >= room
            try:
                outbox.send(frame, refusable=True)
                assert not full
                wanted.append(frame)
            except QueueFullError as error:
                assert full and str(error) == "full up"
        elif event == "k":
            outbox.send(frame, refusable=False)
            wanted.append(frame)
        elif event == "t" and socket.under_way:
            arrived.append(socket.under_way.popleft())
        elif event == "f":
            outbox.flush()
            assert len(socket.under_way) == min(room, len(wanted) - len(arrived))
    while len(arrived) < len(wanted):
        outbox.flush()
        arrived.append(socket.under_way.popleft())
    assert arrived == wanted and tries[0] == len(wanted) + tries[1]


def test_what_ends_the_same_twice_is_kept_once() -> None:
    socket = Socket(0)
    outbox = Outbox(socket, "full")  # type: ignore[arg-type]
    for _ in range(3):
        outbox.send(b"abort", refusable=False)
    socket._room = 9
    outbox.flush()
    assert list(socket.under_way) == [b"abort"]
    with pytest.raises(zmq.ZMQError):
        Outbox(Broken(), "full").send(b"x", refusable=True)  # type: ignore[arg-type]


class Broken:
    def send(self, frame: bytes, flags: int) -> None:
        raise zmq.ZMQError(zmq.ENOTSOCK)
