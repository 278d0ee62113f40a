"""Compiling while the engine serves: a thread of its own, at a low priority, whose result is put in between steps.

The runner's thread must not wait for a compiler, and the core's loop must not either; so neither runs this.
"""

from __future__ import annotations

import atexit
import logging
import threading
import time
from collections.abc import Callable

from compilation.behind import THREAD_PREFIX, CompileJob, Swap, interrupt, stop_compilers
from compilation.priority import LOW, lower_thread

logger = logging.getLogger(__name__)

STOP_S = 0.5
"""how long `stop` waits for the thread; compilers are ended at once, what the interpreter computes is not"""
EXIT_S = 20.0
"""how long the interpreter waits at its exit: a thread inside torch must not see it go"""
_INTERRUPT_S = 0.1


class CompilationBehind:
    """One job in a thread; `deliver` gets, in that thread, what it made."""

    def __init__(
        self, job: CompileJob, prepare: Callable[[], None], deliver: Callable[[Swap | BaseException], None]
    ) -> None:
        """`prepare` runs in the thread first. Nothing is delivered after `stop`."""
        self._stopped = threading.Event()
        self._thread = threading.Thread(
            target=self._run, args=(job, prepare, deliver), name=f"{THREAD_PREFIX}pieces", daemon=True
        )
        self._thread.start()
        atexit.register(self._leave)

    def stop(self) -> None:
        """End the compilers that run, and the job at its next part. Returns soon: see `STOP_S`."""
        if self._end(STOP_S):
            atexit.unregister(self._leave)

    def _end(self, timeout_s: float) -> bool:
        self._stopped.set()
        return stop_compilers(self._thread, timeout_s)

    def _leave(self) -> None:
        """At the interpreter's exit, where nothing that this thread leaves half-done can matter any more."""
        deadline = time.monotonic() + EXIT_S
        while not self._end(_INTERRUPT_S) and time.monotonic() < deadline:
            interrupt(self._thread)

    def _run(
        self, job: CompileJob, prepare: Callable[[], None], deliver: Callable[[Swap | BaseException], None]
    ) -> None:
        lower_thread(threading.get_native_id(), LOW)  # and the threads and compilers that it starts
        began = time.monotonic()
        result: Swap | BaseException
        try:
            prepare()
            result = job(self._stopped)
        except BaseException as error:  # handed on: to whoever serves, a failed compilation is news, not an end
            result = error
        logger.debug("compiling behind took %.1f s", time.monotonic() - began)
        if not self._stopped.is_set():
            deliver(result)
