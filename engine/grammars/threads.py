"""Threads that compile grammars: quick ones do not wait for slow ones, and streams for none of them.

All of them give way to the engine. One that takes longer than others is left to what CPU nobody else wants, and another
thread takes its place.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from queue import SimpleQueue

from compilation.priority import LOW, LOWEST, lower_thread

_PATIENCE_S = 0.05
_MOST = 4
"""threads, the slow ones included"""


class _Worker:
    """One thread, by what it is busy with."""

    def __init__(self) -> None:
        self.native_id = 0
        self.busy = self.slow = False


class Threads:
    """`put` from one thread."""

    def __init__(self, work: Callable[[str], None]) -> None:
        """`work`: raises nothing."""
        self._work = work
        self._waiting: SimpleQueue[str] = SimpleQueue()
        self._lock = threading.Lock()
        self._quick = self._slow = 0

    def put(self, grammar: str) -> None:
        self._waiting.put(grammar)
        with self._lock:
            self._start_another()

    def _start_another(self) -> None:
        """Under the lock: where no quick one is left."""
        if not self._quick and self._slow < _MOST:
            threading.Thread(target=self._run, args=(_Worker(),), name="grammars", daemon=True).start()
            self._quick += 1

    def _run(self, worker: _Worker) -> None:
        worker.native_id = threading.get_native_id()
        lower_thread(worker.native_id, LOW)
        while True:
            grammar = self._waiting.get()
            worker.busy = True
            timer = threading.Timer(_PATIENCE_S, self._leave_behind, (worker,))
            timer.daemon = True
            timer.start()
            self._work(grammar)
            timer.cancel()
            with self._lock:
                worker.busy = False
                if worker.slow:
                    self._slow -= 1
                    self._start_another()
                    return

    def _leave_behind(self, worker: _Worker) -> None:
        with self._lock:
            if not worker.busy:
                return
            worker.slow = True
            lower_thread(worker.native_id, LOWEST)
            self._quick -= 1
            self._slow += 1
            self._start_another()
