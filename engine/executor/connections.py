"""Streams between hosts: who is at the other end knows the group's secret, and its loss is seen within some seconds.

Both sides prove that they know the secret (HMAC-SHA256 over fresh numbers of both), without sending it. What follows is
neither encrypted nor signed: the network between the hosts must be closed to others.
"""

from __future__ import annotations

import hmac
import secrets
import socket
import struct
import threading
import time
from contextlib import suppress
from queue import Empty, SimpleQueue
from typing import Literal, NamedTuple

import msgspec

from engine.errors import EngineError
from engine.executor.frames import StreamKind

Address = tuple[str, int]
HANDSHAKE_S = 10.0
"""for all of it"""
LOST_MS = 4000
"""how long a host may keep silent to what was sent to it, or to probes"""
_PROBES = ((socket.TCP_KEEPIDLE, 1), (socket.TCP_KEEPINTVL, 1), (socket.TCP_KEEPCNT, 3))
_MAGIC = b"plranks1"
_NONCE = 32
_LENGTH = struct.Struct("<H")
_MOST_WAITING = 64


class Purpose(msgspec.Struct, frozen=True):
    """What a stream is for, and of which rank's host it comes."""

    kind: Literal["agent", "frames"] | StreamKind
    rank: int


class Joined(NamedTuple):
    purpose: Purpose
    stream: socket.socket


class Listener:
    """Takes streams from those who know the secret; others are dropped, and hold up nobody."""

    def __init__(self, host: str, secret: bytes) -> None:
        """At a free port of `host`, which may be "" for all of this host's addresses. Raises OSError."""
        self._secret = secret
        self._socket = socket.create_server((host, 0), family=_family(host), backlog=_MOST_WAITING)
        self._joined: SimpleQueue[Joined] = SimpleQueue()
        self._closed = False
        self._lock = threading.Lock()
        self._unproven: list[socket.socket] = []
        """in the order in which they came"""
        self._thread = threading.Thread(target=self._accept, name="ranks-join", daemon=True)
        self._thread.start()

    @property
    def port(self) -> int:
        port: int = self._socket.getsockname()[1]
        return port

    def next(self, timeout_s: float) -> Joined | None:
        """The caller closes the stream. None: nobody has come."""
        try:
            return self._joined.get(timeout=timeout_s)
        except Empty:
            return None

    def close(self) -> None:
        """Nobody comes in any more; streams that nobody has taken are closed."""
        self._closed = True
        with suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)  # wakes who accepts
        self._thread.join()
        self._socket.close()
        with suppress(Empty):
            while True:
                self._joined.get_nowait().stream.close()

    def _accept(self) -> None:
        while not self._closed:
            try:
                stream, _ = self._socket.accept()
            except OSError:
                if self._closed:
                    return
                time.sleep(0.05)  # too many descriptors are open
                continue
            with self._lock:
                self._unproven.append(stream)
                if len(self._unproven) > _MOST_WAITING:  # who has proved nothing for longest gives way
                    _hang_up(self._unproven.pop(0))
            try:
                threading.Thread(target=self._admit, args=(stream,), name="ranks-handshake", daemon=True).start()
            except RuntimeError:  # there are too many; who comes again is let in once there are fewer
                self._settle(stream)
                stream.close()

    def _admit(self, stream: socket.socket) -> None:
        try:
            purpose = _admitted(stream, self._secret)
            self._settle(stream)
            if purpose is None or self._closed:
                stream.close()
            else:
                self._joined.put(Joined(purpose, stream))
        except (OSError, EOFError, msgspec.DecodeError):
            self._settle(stream)
            stream.close()

    def _settle(self, stream: socket.socket) -> None:
        with self._lock, suppress(ValueError):
            self._unproven.remove(stream)


def connect(address: Address, secret: bytes, purpose: Purpose, timeout_s: float) -> socket.socket:
    """A stream to a `Listener`. Raises `EngineError`: it is not there, or does not know the secret."""
    deadline = time.monotonic() + timeout_s
    while True:
        try:
            stream = socket.create_connection(address, timeout=max(deadline - time.monotonic(), 0.1))
            break
        except OSError as error:
            if time.monotonic() >= deadline:
                raise EngineError(f"no connection to {address[0]}, port {address[1]}: {error}") from None
            time.sleep(0.1)
    try:
        _introduce(stream, secret, purpose)
    except (OSError, EOFError) as error:
        stream.close()
        raise EngineError(
            f"{address[0]}, port {address[1]}, ended the handshake ({error}): it is another group's, or nobody's"
        ) from None
    return stream


def _hang_up(stream: socket.socket) -> None:
    with suppress(OSError):  # it has left
        stream.shutdown(socket.SHUT_RDWR)


def _watch_for_loss(stream: socket.socket) -> None:
    """From now on it ends with an error once the other host has not answered for `LOST_MS`; what is sent goes out at
    once."""
    stream.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    stream.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for option, value in _PROBES:
        stream.setsockopt(socket.IPPROTO_TCP, option, value)
    stream.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, LOST_MS)


def _begin(stream: socket.socket, purpose: Purpose) -> None:
    """After the handshake. Who computes does not read: where the buffers are full meanwhile, the kernel would count
    that as silence. Whether the host is there, the agent's stream tells, which is always read."""
    stream.settimeout(None)
    if purpose.kind != "agent":
        stream.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, 0)


def own_host(address: Address) -> str:
    """Under which of its own addresses this host reaches `address`; nothing is sent."""
    with socket.socket(_family(address[0]), socket.SOCK_DGRAM) as probe:
        probe.connect(address)
        host: str = probe.getsockname()[0]
        return host


def _introduce(stream: socket.socket, secret: bytes, purpose: Purpose) -> None:
    deadline = time.monotonic() + HANDSHAKE_S
    stream.settimeout(HANDSHAKE_S)
    _watch_for_loss(stream)
    told, own = msgspec.msgpack.encode(purpose), secrets.token_bytes(_NONCE)
    stream.sendall(_MAGIC + own + _LENGTH.pack(len(told)) + told)
    theirs = _receive(stream, _NONCE, deadline)
    if not hmac.compare_digest(_receive(stream, 32, deadline), _proof(secret, b"listener", own, theirs, told)):
        raise EOFError("it does not know the secret")
    stream.sendall(_proof(secret, b"caller", theirs, own, told))
    if _receive(stream, 1, deadline) != b"k":
        raise EOFError("it refused")
    _begin(stream, purpose)


def _admitted(stream: socket.socket, secret: bytes) -> Purpose | None:
    deadline = time.monotonic() + HANDSHAKE_S
    stream.settimeout(HANDSHAKE_S)
    _watch_for_loss(stream)
    if not hmac.compare_digest(_receive(stream, len(_MAGIC), deadline), _MAGIC):
        return None
    theirs, own = _receive(stream, _NONCE, deadline), secrets.token_bytes(_NONCE)
    (length,) = _LENGTH.unpack(_receive(stream, _LENGTH.size, deadline))
    told = _receive(stream, min(length, 1024), deadline)
    stream.sendall(own + _proof(secret, b"listener", theirs, own, told))
    if not hmac.compare_digest(_receive(stream, 32, deadline), _proof(secret, b"caller", own, theirs, told)):
        return None
    purpose = msgspec.msgpack.decode(told, type=Purpose)
    stream.sendall(b"k")
    _begin(stream, purpose)
    return purpose


def _proof(secret: bytes, side: bytes, *numbers: bytes) -> bytes:
    return hmac.digest(secret, side + b"".join(numbers), "sha256")


def _receive(stream: socket.socket, size: int, deadline: float) -> bytes:
    """`deadline`: on `time.monotonic`'s clock. Raises OSError, EOFError."""
    data = b""
    while len(data) < size:
        left = deadline - time.monotonic()
        if left <= 0:
            raise TimeoutError("the handshake took too long")
        stream.settimeout(left)
        part = stream.recv(size - len(data))
        if not part:
            raise EOFError("it closed the connection")
        data += part
    return data


def _family(host: str) -> socket.AddressFamily:
    return socket.AF_INET6 if ":" in host else socket.AF_INET
