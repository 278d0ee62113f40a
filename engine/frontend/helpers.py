"""Work that can be abandoned: helper processes that answer questions, one at a time each.

A thread cannot be ended from outside; a process can. So what a request may blow up (a template is a program, a long
text may meet a tokenizer's worst case) is done in one (`helper_main`), with a bound on its memory and on the time of
each answer. Whoever is cancelled while a helper works for him ends that helper; the next question starts another.
Questions and answers are bytes, never pickles.
"""

from __future__ import annotations

import asyncio
import json
import logging
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Callable
from typing import Any

from compilation.priority import LOWEST, lower_session, lower_thread
from engine.errors import EngineError, RequestFailedError
from engine.frontend.helper_main import HEADER_BYTES, frame
from engine.frontend.turns import Turns

logger = logging.getLogger(__name__)

_RECEIVE_BYTES = 1 << 20
_AGAIN_S = 0.1
"""until a priority that the kernel would not take is told once more"""
# As the core's: the child imports from where the parent does, and not from the user's directory (-P).
_BOOT = (
    "import json, sys; sys.path[:] = json.loads(sys.argv[1]); "
    "from engine.frontend.helper_main import main; main(sys.argv[2], int(sys.argv[3]))"
)


class HelperEndedError(EngineError):
    """The process ended before it answered."""

    def __init__(self, number: int) -> None:
        """`number`: of the signal that ended it, or 0."""
        super().__init__(f"the helper process ended with {signal.Signals(number).name if number else 'an error'}")
        self.too_slow = number == signal.SIGALRM
        self.too_large = number == signal.SIGABRT  # what Rust's allocator does when there is no more


class Helper:
    """One process. It starts in the background: the first question waits for it."""

    def __init__(self, make: str, setup: bytes, memory_bytes: int, priority: int = 0) -> None:
        """`priority`: its niceness."""
        self._socket, theirs = socket.socketpair()
        with theirs:
            self._process = subprocess.Popen(
                [sys.executable, "-P", "-c", _BOOT, json.dumps(sys.path), make, str(memory_bytes)],
                stdin=theirs.fileno(),
                stdout=subprocess.DEVNULL,
                # Ctrl-C is for the parent. Linux shares the CPUs out by session first: in a session of its own a helper
                # weighs as much as the core until its share is lowered, so only those are that begin with a low one.
                start_new_session=priority > 0,
                process_group=None if priority > 0 else 0,
            )
        self._leads = priority > 0
        self._wanted = priority
        """its priority, until the kernel has taken it"""
        self._take_priority()
        self._to_send = frame(setup)
        self._unread = 1  # the answer to the setup
        self.demoted = False
        self._received = bytearray()

    def ask(self, question: bytes, seconds: float) -> bytes:
        """Raises `HelperEndedError`; the helper is of no use then, nor when this is interrupted."""
        self._socket.settimeout(None)
        try:
            self._socket.sendall(self._take_question(question, seconds))
            while (answer := self._answer()) is None:
                self._take(self._socket.recv(_RECEIVE_BYTES))
        except OSError:
            raise self._ended() from None
        return answer

    async def ask_async(
        self, question: bytes, seconds: float, patience_s: float | None = None, late_news: asyncio.Event | None = None
    ) -> bytes:
        """`patience_s`: an answer that takes longer is left to the lowest priority, and `late_news` is set."""
        loop, late = asyncio.get_running_loop(), None
        self._socket.settimeout(0)
        try:
            await loop.sock_sendall(self._socket, self._take_question(question, seconds))
            while (answer := self._answer()) is None:
                if late is None and patience_s is not None and self._unread == 1:  # it has started
                    late = loop.call_later(patience_s, self._demote, late_news)
                self._take(await loop.sock_recv(self._socket, _RECEIVE_BYTES))
        except OSError:
            raise self._ended() from None
        finally:
            if late is not None:
                late.cancel()
        return answer

    def _take_priority(self) -> None:
        if self._wanted and lower_session(self.pid, self._wanted):
            self._wanted = 0

    def _take_question(self, question: bytes, seconds: float) -> bytes:
        self._take_priority()
        to_send, self._to_send = self._to_send + frame(question, max(1, round(1000 * seconds))), b""
        self._unread += 1
        return to_send

    def _take(self, received: bytes) -> None:
        if not received:
            raise ConnectionResetError
        self._received += received

    def _answer(self) -> bytes | None:
        """The one to the question, when it is complete."""
        while len(self._received) >= HEADER_BYTES:
            size = int.from_bytes(self._received[:HEADER_BYTES], "little")
            if len(self._received) < HEADER_BYTES + size:
                return None
            answer = bytes(self._received[HEADER_BYTES : HEADER_BYTES + size])
            del self._received[: HEADER_BYTES + size]
            self._unread -= 1
            if self._unread == 0:
                return answer
        return None

    def _ended(self) -> HelperEndedError:
        self._process.kill()  # a no-op where its end is why the socket closed
        return HelperEndedError(max(0, -self._process.wait()))

    def _demote(self, news: asyncio.Event | None) -> None:
        """From now on it gives way to everything else; it cannot be raised again."""
        self.demoted, self._wanted = True, 0
        if news is not None:
            news.set()
        self._lower()

    def _lower(self) -> None:
        if not self.alive:
            return
        if not self._leads:
            lower_thread(self.pid, LOWEST)  # its only one
        elif not lower_session(self.pid, LOWEST):
            asyncio.get_running_loop().call_later(_AGAIN_S, self._lower)

    @property
    def pid(self) -> int:
        return self._process.pid

    @property
    def alive(self) -> bool:
        return self._process.poll() is None

    def end(self) -> None:
        """At once; idempotent."""
        self._socket.close()
        if self._process.poll() is None:
            self._process.kill()
            # Giving its memory back may take the kernel a moment: nobody waits for that here.
            threading.Thread(target=self._process.wait, name="helper-end", daemon=True).start()


class Helpers:
    """Helpers of one kind, as many as there are turns, started when they are needed."""

    def __init__(
        self,
        make: str,
        *,
        setup: Callable[[], bytes] = bytes,
        memory_bytes: int,
        turns: Turns,
        patience_s: float | None = None,
        slow_turns: Turns | None = None,
        priority: int = 0,
    ) -> None:
        """`make`, `setup`: for `helper_main.main`. `priority`: the niceness of all. `patience_s`: a helper whose answer
        takes longer gets only the CPU that the event loop and the core leave, is not asked again, and gives its turn to
        the next one for one of `slow_turns`: who is quick does not wait for those who are not."""
        self._make, self._setup, self._memory_bytes = make, setup, memory_bytes
        self._patience_s = patience_s
        self._slow_turns = slow_turns
        self._priority = priority
        self._idle: list[Helper] = []
        self._turns = turns
        self._lock = threading.Lock()
        self._closed = False

    def start_one(self) -> None:
        """So that the first question need not wait for a start."""
        self._give_back(self._new())

    def ask(self, question: bytes, seconds: float) -> bytes:
        """For threads, of which each has a helper of its own. Raises `HelperEndedError`."""
        helper = self._take()
        try:
            answer = helper.ask(question, seconds)
        except BaseException:
            helper.end()
            raise
        self._give_back(helper)
        return answer

    async def ask_async(self, question: bytes, seconds: float) -> bytes:
        """For one event loop. Raises `HelperEndedError` and `QueueFullError`; being cancelled ends the work."""
        turns = self._turns
        await turns.take(0.0)
        try:
            helper, late = self._take(), asyncio.Event()
            asking = asyncio.ensure_future(helper.ask_async(question, seconds, self._patience_s, late))
            try:
                if self._slow_turns is not None and await _comes_first(late, asking):
                    await self._slow_turns.take(0.0)
                    turns.give()
                    turns = self._slow_turns
                answer = await asking
            except BaseException:
                asking.cancel()
                helper.end()
                raise
            self._give_back(helper)
            return answer
        finally:
            turns.give()

    def close(self) -> None:
        """End those that are idle, and each that is busy when it has answered."""
        with self._lock:
            self._closed = True
            idle, self._idle = self._idle, []
        for helper in idle:
            helper.end()

    def _new(self) -> Helper:
        try:
            return Helper(self._make, self._setup(), self._memory_bytes, self._priority)
        except OSError as error:
            raise RequestFailedError(f"no helper process can be started: {error}") from error

    def _take(self) -> Helper:
        with self._lock:
            if self._closed:
                raise RequestFailedError("the tokenizer is closed")
            while self._idle:
                helper = self._idle.pop()
                if helper.alive:
                    return helper
                helper.end()
        return self._new()

    def _give_back(self, helper: Helper) -> None:
        with self._lock:
            if not self._closed and not helper.demoted and len(self._idle) < self._turns.size:
                self._idle.append(helper)
                return
        helper.end()


async def _comes_first(event: asyncio.Event, work: asyncio.Future[bytes]) -> bool:
    """The event, before the work is done."""
    waiting = asyncio.ensure_future(event.wait())
    both: set[asyncio.Future[Any]] = {waiting, work}
    try:
        await asyncio.wait(both, return_when=asyncio.FIRST_COMPLETED)
        return not work.done()
    finally:
        waiting.cancel()
