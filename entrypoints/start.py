"""Where a door's process begins: from here on Ctrl-C ends it with one line, also in the middle of an import.

Imports take seconds, and an interrupt inside one is a traceback of somebody else's files, or is swallowed. So as long
as there is nothing to take down, Ctrl-C ends the process at once; a door that has something says so
(`interrupts_raise`), and sees `KeyboardInterrupt` from then on. Nothing but the interpreter's own modules is imported
before that.
"""

from __future__ import annotations

import os
import signal
import sys
from importlib import import_module
from types import FrameType

INTERRUPTED = 128 + signal.SIGINT


def serve() -> int:
    return _door("engine-serve", "entrypoints.serve")


def chat() -> int:
    return _door("engine-chat", "entrypoints.chat")


def bench() -> int:
    return _door("engine-bench", "entrypoints.bench.cli")


def batch() -> int:
    return _door("engine-batch", "entrypoints.batch")


def interrupts_raise() -> None:
    """From now on Ctrl-C raises `KeyboardInterrupt`. Without effect where no door began here (tests, embedding)."""
    if isinstance(signal.getsignal(signal.SIGINT), _EndAtOnce):
        signal.signal(signal.SIGINT, signal.default_int_handler)


class _EndAtOnce:
    def __init__(self, name: str) -> None:
        self._line = f"{name}: interrupted\n".encode()

    def __call__(self, number: int, frame: FrameType | None) -> None:
        os.write(2, self._line)
        os._exit(INTERRUPTED)

    def install(self) -> None:
        """Where Ctrl-C is ignored (a background job of a shell), it stays so."""
        if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
            signal.signal(signal.SIGINT, self)


def _door(name: str, module: str) -> int:
    end_at_once = _EndAtOnce(name)
    end_at_once.install()
    try:
        status: int = import_module(module).main()
    except KeyboardInterrupt:
        print(f"{name}: interrupted", file=sys.stderr)
        status = INTERRUPTED
    if status == INTERRUPTED:
        end_at_once.install()  # whoever is impatient need not wait for the interpreter's own end
    return status
