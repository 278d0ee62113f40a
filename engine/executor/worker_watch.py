"""The processes of all ranks but the driver's own, watched by one thread: answers, deaths, stops, what is left to send.

The thread sleeps in the kernel until something happens. While the workers owe something (an answer, a step) it also
looks every `LOOK_S` whether one was stopped, which no descriptor tells. Idle, it has no timer.
"""

from __future__ import annotations

import os
import select
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from queue import SimpleQueue

import msgspec

from engine import errors
from engine.core.wire import CoreFailed
from engine.errors import EngineError, in_words
from engine.executor.frames import Answer, Close, LoadedAdapter, encode_message
from engine.executor.worker_link import Handle

LOOK_S = 0.2
STOPPED_LOOKS = 3
"""looks in a row, rather than a time: where all of us were stopped and go on, time has passed for none of us"""
CLOSE_S = 5.0
"""how long workers may take to leave by themselves"""


class WorkerWatch:
    """All methods are for the executor's thread.

    The first failure of any worker is kept: `failed` is called with its cause, one line, from the thread that watches,
    and `answers` raises it, also in who waits there.
    """

    def __init__(
        self,
        ranks: Sequence[int],
        start: Callable[[], Iterable[Handle]],
        failed: Callable[[str], None],
    ) -> None:
        """`start` brings each of `ranks`, in this order, and is called by the thread that watches, with which workers
        of this host die. What it raises is raised; then none is left."""
        self._failed = failed
        self._failure: tuple[type[EngineError], str] | None = None
        self._answers: dict[int, SimpleQueue[Answer | None]] = {rank: SimpleQueue() for rank in ranks}
        """None: look at the failure"""
        self.heard_of_adapter: Callable[[int, LoadedAdapter], None] | None = None
        """called with a rank's answer, from the thread that watches; None: it is one of `answers`"""
        self._owed = 0
        self._looks = False
        """the thread wakes by itself"""
        self._deadline: float | None = None
        """when workers that are to leave are killed"""
        self._wake_fd = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self._workers: list[Handle] = []
        begun: SimpleQueue[BaseException | None] = SimpleQueue()
        self._thread = threading.Thread(target=self._run, args=(start, begun), name="workers", daemon=True)
        self._thread.start()
        if (error := begun.get()) is not None:
            self._thread.join()
            os.close(self._wake_fd)
            raise error

    @property
    def failure(self) -> EngineError | None:
        """Why the group is of no use any more: a new exception each time."""
        if self._failure is None:
            return None
        kind, message = self._failure
        return kind(message)

    @property
    def pids(self) -> list[int]:
        """By rank, from rank 1 on."""
        return [worker.pid for worker in self._workers]

    def send(self, frame: bytes, ranks: range | None = None) -> None:
        """To those workers, or to each; never waits."""
        for worker in self._workers:
            if (ranks is None or worker.rank in ranks) and not worker.link.send(frame):
                self._wake()

    def owe(self) -> None:
        """From now on the workers owe something more; `owe_less` when it has come."""
        self._owed += 1
        if not self._looks:  # in this order; the thread looks at them the other way round
            self._wake()

    def owe_less(self) -> None:
        self._owed -= 1

    def answers(self) -> list[Answer]:
        """Wait for one answer of each worker; by rank. Raises the failure of any."""
        self.owe()
        try:
            answers = []
            for queue in self._answers.values():
                answer = None if self._failure else queue.get()
                if answer is None:
                    error = self.failure
                    assert error is not None
                    raise error
                answers.append(answer)
            return answers
        finally:
            self.owe_less()

    def ask_to_leave(self) -> None:
        """Their ends are no failures any more; those that are left after `CLOSE_S` are killed."""
        if self._deadline is None:
            self._deadline = time.monotonic() + CLOSE_S
            self.send(encode_message(Close()))
            self._wake()

    def close(self) -> None:
        """Returns when no process is left; once."""
        self.ask_to_leave()
        self._thread.join()
        os.close(self._wake_fd)

    def _wake(self) -> None:
        os.eventfd_write(self._wake_fd, 1)

    def _run(self, start: Callable[[], Iterable[Handle]], begun: SimpleQueue[BaseException | None]) -> None:
        alive = self._workers
        try:
            for worker in start():
                alive.append(worker)  # at once: those that are there are ended where the next one cannot be
            begun.put(None)
            alive = list(alive)
            while alive:
                self._turn(alive)
        except BaseException as error:  # nobody watches any more: nobody is left
            begun.put(error)
            self._fail(EngineError, f"who watches the workers failed: {in_words(error)}")
            for worker in alive:
                worker.kill()
                worker.reap()

    def _turn(self, alive: list[Handle]) -> None:
        ready = dict(self._poll(alive).poll(self._timeout_ms()))
        if self._wake_fd in ready:
            os.eventfd_read(self._wake_fd)
        for worker in list(alive):
            if worker.link.has_backlog:
                worker.link.flush()
            self._hear(worker)
            if worker.sentinel in ready and worker.has_ended():
                alive.remove(worker)
                self._end(worker)
        self._look(alive)

    def _poll(self, alive: list[Handle]) -> select.poll:
        poll = select.poll()
        poll.register(self._wake_fd, select.POLLIN)
        for worker in alive:
            poll.register(worker.sentinel, select.POLLIN)
            if worker.link.hears:
                poll.register(worker.link.socket, select.POLLIN | (select.POLLOUT if worker.link.has_backlog else 0))
        return poll

    def _timeout_ms(self) -> float | None:
        if self._deadline is not None:
            return 1000 * max(self._deadline - time.monotonic(), LOOK_S)
        self._looks = False  # in this order: see `owe`
        self._looks = self._owed > 0
        return 1000 * LOOK_S if self._looks else None

    def _hear(self, worker: Handle) -> None:
        try:
            messages = worker.link.receive()
        except (ValueError, msgspec.MsgspecError) as error:  # it wrote something else, by mistake
            self._fail(EngineError, f"{worker.name} sent what is no message: {error}")
            worker.kill()
            return
        for message in messages:
            if isinstance(message, CoreFailed):
                self._fail(*_cause(worker.name, message))
            elif isinstance(message, LoadedAdapter) and self.heard_of_adapter is not None:
                self.heard_of_adapter(worker.rank, message)
            else:
                self._answers[worker.rank].put(message)

    def _end(self, worker: Handle) -> None:
        self._hear(worker)  # its last words
        cause = worker.reap()
        self._fail(EngineError, f"{worker.name} died: {cause}")

    def _look(self, alive: list[Handle]) -> None:
        if self._deadline is not None:
            if time.monotonic() >= self._deadline:
                for worker in alive:
                    worker.kill()
        elif self._looks:
            for worker in alive:
                worker.stopped_looks = worker.stopped_looks + 1 if worker.is_stopped() else 0
                if worker.stopped_looks >= STOPPED_LOOKS:
                    self._fail(EngineError, f"{worker.name} was stopped by a signal while the others waited for it")
                    worker.kill()

    def _fail(self, kind: type[EngineError], message: str) -> None:
        """The first one counts. Who waits learns the cause: it is kept before anything wakes him."""
        if self._failure is not None or self._deadline is not None:
            return
        self._failure = kind, message
        self._failed(message.rpartition("\n")[2])
        for queue in self._answers.values():
            queue.put(None)


def _cause(name: str, failed: CoreFailed) -> tuple[type[EngineError], str]:
    """As one of our own errors with its own text, or as one whose last line is the root cause."""
    known = getattr(errors, failed.kind or "", None)
    if isinstance(known, type) and issubclass(known, EngineError):
        return known, failed.message
    return EngineError, f"{name} failed\n{failed.traceback}"
