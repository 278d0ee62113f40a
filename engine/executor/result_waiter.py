"""Who waits for a device that runs behind: a thread with nothing else to do, so that the core's loop, which takes
messages meanwhile, and the runner's thread, which launches the next step, never do.

It sleeps in the event of the oldest step (or in its queue when there is none): no polling, and results come in order.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from queue import SimpleQueue


class ResultWaiter:
    """Runs what it is given, in order, in a thread of its own. `prepare` runs there first."""

    def __init__(self, prepare: Callable[[], None]) -> None:
        self._queue: SimpleQueue[Callable[[], None] | None] = SimpleQueue()
        self._thread = threading.Thread(target=self._run, args=(prepare,), name="results", daemon=True)
        self._thread.start()

    def put(self, wait: Callable[[], None]) -> None:
        """`wait` must not raise: it hands its error to whoever asks for the result."""
        self._queue.put(wait)

    def close(self) -> None:
        """Waits for all that was put; then nothing may be put any more."""
        self._queue.put(None)
        self._thread.join()

    def _run(self, prepare: Callable[[], None]) -> None:
        prepare()
        while (wait := self._queue.get()) is not None:
            wait()
            del wait  # it keeps a step's tensors alive otherwise until the next one comes
