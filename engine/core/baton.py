"""Who may touch the scheduler: the loop's thread, and while that computes a step itself (an executor without a thread
of its own, on CPUs) the one that receives."""

from __future__ import annotations

import threading


class Baton:
    """Held by the loop's thread, which lends it as a context."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._lock.acquire()
        self._is_lent = False

    def __enter__(self) -> None:
        self._is_lent = True
        self._lock.release()

    def __exit__(self, *_: object) -> None:
        """Whoever has it gives it back after one message: nobody takes it again from now on."""
        self._is_lent = False
        self._lock.acquire()

    def take(self) -> bool:
        """From another thread, without waiting. True: it is to `give_back`."""
        return self._is_lent and self._lock.acquire(blocking=False)

    def give_back(self) -> None:
        self._lock.release()
