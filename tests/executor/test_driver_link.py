"""A rank's end of the stream to its driver: however the driver goes, the rank learns that it has gone."""

from __future__ import annotations

import errno
import os
import socket

import pytest

from engine.executor.driver_link import DriverLeftError, DriverLink
from engine.executor.frames import Close, encode_message


class Falling:
    """A socket whose other host has fallen silent, as the kernel tells it after some seconds."""

    def __init__(self, error: OSError) -> None:
        self.error = error

    def setblocking(self, blocks: bool) -> None:
        pass

    def recv(self, count: int) -> bytes:
        raise self.error


@pytest.fixture
def pair() -> tuple[DriverLink, socket.socket]:
    ours, theirs = socket.socketpair()
    return DriverLink(ours.detach()), theirs


@pytest.mark.parametrize("number", [errno.ECONNRESET, errno.ETIMEDOUT, errno.EHOSTUNREACH])
def test_a_host_that_falls_silent_is_a_driver_that_has_left(
    number: int, pair: tuple[DriverLink, socket.socket], monkeypatch: pytest.MonkeyPatch
) -> None:
    link, _ = pair
    monkeypatch.setattr(link, "_socket", Falling(OSError(number, os.strerror(number))))
    with pytest.raises(DriverLeftError):
        link.receive()


def test_who_is_asked_to_leave_and_who_is_left_are_told_at_once(pair: tuple[DriverLink, socket.socket]) -> None:
    link, driver = pair
    assert not link.is_asked_to_leave(0)
    driver.sendall(encode_message(Close()))
    assert link.is_asked_to_leave(0)
    driver.close()
    assert link.is_asked_to_leave(5)
