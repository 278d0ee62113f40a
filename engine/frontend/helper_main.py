"""A helper process: answers one question after another on the socket that is its standard input.

Nothing but what the answers need is imported. Before each question an alarm is set, whose signal nobody handles: what
takes too long is ended by the kernel, whatever it is busy with, and also where the process that asked is gone.
"""

from __future__ import annotations

import os
import resource
import signal
import socket
from collections.abc import Callable
from importlib import import_module

HEADER_BYTES = 8
"""of a frame: the length of what follows"""

Answer = Callable[[bytes], bytes]


def main(make: str, memory_bytes: int) -> None:
    """`make`: "module:function", called with the first frame; what it returns answers the others. The first answer,
    which is empty, says that the process is ready."""
    signal.signal(signal.SIGALRM, signal.SIG_DFL)  # an ignored signal would stay so
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGALRM})
    resource.setrlimit(resource.RLIMIT_DATA, (memory_bytes, memory_bytes))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    module, _, function = make.partition(":")
    with socket.socket(fileno=0) as stream:
        answer: Answer = getattr(import_module(module), function)(_receive(stream)[1])
        _send(stream, b"")
        while True:
            seconds, question = _receive(stream)
            signal.setitimer(signal.ITIMER_REAL, seconds)
            reply = answer(question)
            signal.setitimer(signal.ITIMER_REAL, 0)
            del question
            _send(stream, reply)


def frame(body: bytes, milliseconds: int = 0) -> bytes:
    """As it travels; `milliseconds`: that the answer may take."""
    return len(body).to_bytes(HEADER_BYTES, "little") + milliseconds.to_bytes(HEADER_BYTES, "little") + body


def _receive(stream: socket.socket) -> tuple[float, bytes]:
    header = _read(stream, 2 * HEADER_BYTES)
    size = int.from_bytes(header[:HEADER_BYTES], "little")
    return int.from_bytes(header[HEADER_BYTES:], "little") / 1000, _read(stream, size)


def _read(stream: socket.socket, size: int) -> bytes:
    """Ends the process when the other side is gone."""
    received = bytearray()
    while len(received) < size:
        part = stream.recv(min(size - len(received), 1 << 20))
        if not part:
            os._exit(0)
        received += part
    return bytes(received)


def _send(stream: socket.socket, body: bytes) -> None:
    try:
        stream.sendall(len(body).to_bytes(HEADER_BYTES, "little") + body)
    except OSError:
        os._exit(0)
