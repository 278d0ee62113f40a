"""Compiling behind a process that serves: at a low priority, and able to stop at once.

Everything that compiles runs in threads whose names begin with `THREAD_PREFIX`; the compilers that they start are found
through the kernel's list of each thread's children, so that nobody else's child is ever touched.
"""

from __future__ import annotations

import contextlib
import ctypes
import threading
import time
from collections.abc import Callable
from pathlib import Path

import psutil

from compilation.errors import CompileError

THREAD_PREFIX = "compile-"
_POLL_S = 0.02


Swap = Callable[[], None]
CompileJob = Callable[[threading.Event], Swap]
"""compiles, unless the event is set meanwhile; returns what puts the result in place, to be called between two steps"""


class CompileStoppedError(CompileError):
    """Compilation ended because it was asked to."""


def check_stop(stop: threading.Event | None) -> None:
    """Between the parts of a compilation: raises CompileStoppedError once `stop` is set."""
    if stop is not None and stop.is_set():
        raise CompileStoppedError("compilation was stopped")


def stop_compilers(thread: threading.Thread, timeout_s: float) -> bool:
    """End the compilers that compiling threads run, again and again until `thread` has ended; whether it has in time.

    To be called after `stop` was set: a thread that lost its compiler meets `check_stop` before it starts another.
    """
    deadline = time.monotonic() + timeout_s
    while thread.is_alive() and time.monotonic() < deadline:
        for child in _compilers():
            _kill_tree(child)
        thread.join(_POLL_S)
    return not thread.is_alive()


def interrupt(thread: threading.Thread) -> None:
    """Raise CompileStoppedError in `thread`, wherever its Python code is: in the middle of what is never to be used
    again."""
    if thread.ident is not None:
        ctypes.pythonapi.PyThreadState_SetAsyncExc(ctypes.c_ulong(thread.ident), ctypes.py_object(CompileStoppedError))


def _compilers() -> list[int]:
    """Process ids of the children of compiling threads; empty where the kernel does not tell."""
    found: list[int] = []
    for thread in threading.enumerate():
        if thread.name.startswith(THREAD_PREFIX) and thread.native_id is not None:
            with contextlib.suppress(OSError):
                found += map(int, Path(f"/proc/self/task/{thread.native_id}/children").read_text().split())
    return found


def _kill_tree(pid: int) -> None:
    """A compiler's driver does not take the compiler proper along."""
    with contextlib.suppress(psutil.Error):
        process = psutil.Process(pid)
        for one in [process, *process.children(recursive=True)]:
            with contextlib.suppress(psutil.Error):
                one.kill()
