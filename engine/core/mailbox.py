"""The core's sockets. An I/O thread receives while a step computes, and beats while there is work; who has something to
tell sends it himself, for a thread that is woken for it costs more than the sending.

Four things wake the thread: a frame from the front end, news of other threads here or the end (eventfd), the death of
the parent (pidfd), and, only while the core is busy, the next heartbeat. An idle core has no timer, hence uses no CPU.
"""

from __future__ import annotations

import faulthandler
import logging
import os
import shutil
import signal
import sys
import threading
import time
import traceback

import msgspec
import zmq

from engine.core.inbox import Inbox, Message
from engine.core.loop import CoreLoop, refusal
from engine.core.wire import FromCore, Heartbeat, SequenceDelta, Shutdown, ToCore

logger = logging.getLogger(__name__)

FLUSH_MS = 2000
FULL_POLL_MS = 50
"""how often a full queue is looked at again"""


FRAMES_AT_ONCE = 64
CORRUPT_PAUSE_S = 0.0005
"""for a frame that is no message: a flood of them must not keep the interpreter from the loop's thread. Senders take
turns, so that what others send waits for one such frame at a time."""


class Mailbox:
    """The core's end of both sockets.

    `inbox` is filled from the front end. `publish` may be called from any thread.
    """

    def __init__(
        self,
        to_core: str,
        from_core: str,
        directory: str,
        parent_fd: int,
        heartbeat_s: float,
        hang_timeout_s: float,
        most_frames: int,
    ) -> None:
        """`to_core`, `from_core`: ZeroMQ addresses inside `directory`. `parent_fd`: pidfd of the parent. `most_frames`:
        that wait in the inbox, or to be received by the front end."""
        self.inbox: Inbox = Inbox()
        self._most_frames = most_frames
        self._directory = directory
        self._parent_fd = parent_fd
        self._heartbeat_s = heartbeat_s
        self._hang_timeout_s = hang_timeout_s
        self._loop: CoreLoop | None = None
        self._received = self._dropped = self._corrupt = self._posted = 0
        self._closing = False
        self._post_lock = threading.Lock()
        self._send_lock = threading.Lock()
        """a ZeroMQ socket may pass from thread to thread behind a full fence, which a lock is"""
        self._encoder = msgspec.msgpack.Encoder()
        self._decoder: msgspec.msgpack.Decoder[ToCore] = msgspec.msgpack.Decoder(ToCore)
        self._context = zmq.Context()
        self._receiver = self._socket(zmq.PULL)
        self._receiver.bind(to_core)
        self._sender = self._socket(zmq.PUSH)
        self._sender.connect(from_core)
        self._wake_fd = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self._thread = threading.Thread(target=self._run, name="core-io", daemon=True)
        self._thread.start()

    def attach(self, loop: CoreLoop) -> None:
        """From now on heartbeats tell how `loop` is doing; before, the core counts as starting."""
        self._loop = loop

    def post(self, message: Message) -> None:
        """News from another thread of this process, to a core that may be idle: heartbeats go on until it is again, or
        the front end, which hears of what they bring, would wait for them in vain."""
        with self._post_lock:
            self._posted += 1
        self.inbox.put(message)
        if not self._closing:
            os.eventfd_write(self._wake_fd, 1)

    def publish(self, message: FromCore) -> None:
        """Waits where the front end does not take what was sent before: a core must not fill the memory."""
        frame = self._encoder.encode(message)
        while not self._try_to_send(frame):
            time.sleep(FULL_POLL_MS / 1000)

    def _try_to_send(self, frame: bytes) -> bool:
        with self._send_lock:
            try:
                self._sender.send(frame, zmq.NOBLOCK)
            except zmq.Again:
                return False
        return True

    def close(self) -> None:
        """Send what waits, then free sockets and thread; idempotent."""
        if not self._closing:
            self._closing = True
            os.eventfd_write(self._wake_fd, 1)
            self._thread.join()
            self._context.destroy(linger=FLUSH_MS)
            os.close(self._wake_fd)

    def _socket(self, kind: int) -> zmq.Socket[bytes]:
        socket = self._context.socket(kind)
        socket.setsockopt(zmq.SNDHWM, self._most_frames)
        socket.setsockopt(zmq.RCVHWM, self._most_frames)
        return socket

    def _run(self) -> None:
        try:
            self._serve()
        except BaseException:
            # Without this thread nobody can hear the core; its last words reach the parent through stderr.
            traceback.print_exc()
            sys.stderr.flush()
            os._exit(1)

    def _serve(self) -> None:
        poller = zmq.Poller()
        for source in (self._receiver, self._wake_fd, self._parent_fd):
            poller.register(source, zmq.POLLIN)
        next_beat = self._beat()
        while True:
            timeout_ms = None if next_beat is None else max(0, int(1000 * (next_beat - time.monotonic())) + 1)
            full = self.inbox.qsize() >= self._most_frames
            poller.modify(self._receiver, 0 if full else zmq.POLLIN)
            if full:  # what comes now waits in the sockets, and then in the front end
                timeout_ms = min(FULL_POLL_MS, timeout_ms or FULL_POLL_MS)
            ready = dict(poller.poll(timeout_ms))
            if self._parent_fd in ready:
                self._die_with_parent()
            if self._receiver in ready:
                self._receive()
            if self._wake_fd in ready:
                os.eventfd_read(self._wake_fd)
            if self._closing:
                faulthandler.cancel_dump_traceback_later()
                return
            if next_beat is None or time.monotonic() >= next_beat:
                next_beat = self._beat()

    def _receive(self) -> None:
        """Some of what waits: heartbeats, the parent's death and the end must not wait for a flood."""
        corrupt = self._corrupt
        for _ in range(min(FRAMES_AT_ONCE, self._most_frames - self.inbox.qsize())):
            try:
                frame = self._receiver.recv(zmq.NOBLOCK)
            except zmq.Again:
                break
            self._received += 1
            message = self._decode(frame)
            if message is None:
                self._dropped += 1
            elif not self._taken_now(message):
                self.inbox.put(message)
        time.sleep((self._corrupt - corrupt) * CORRUPT_PAUSE_S)

    def _taken_now(self, message: Message) -> bool:
        """It waits for nothing, not even for the step that computes in the loop's thread."""
        loop = self._loop
        if loop is None or loop.taken + self._dropped + 1 < self._received:
            return False
        return loop.take_now(message, lambda outputs: self._try_to_send(self._encoder.encode(outputs)))

    def _decode(self, frame: bytes) -> ToCore | SequenceDelta | None:
        """A frame that is not a message fails the request it names, where it names one, and nothing else."""
        try:
            return self._decoder.decode(frame)
        except Exception as error:  # RecursionError among them: a frame may be nested without end
            self._corrupt += 1
            if self._corrupt.bit_count() == 1:  # the first, second, fourth …: a flood of them is no flood of lines
                logger.error("dropped corrupt frame %d, of %d bytes: %s", self._corrupt, len(frame), error)
            request_id = _request_id(frame)
            return refusal(request_id, "invalid", error) if request_id else None

    def _beat(self) -> float | None:
        """Send a heartbeat; when the next one is due, or None once the core is idle."""
        loop = self._loop
        if loop is None:
            beat = Heartbeat(turns=0, phase="start", received=self._received)
        else:
            # `taken` before `phase`: when all messages were taken and the loop is idle *after* that, it really is.
            all_taken = loop.taken + self._dropped >= self._received and loop.news_taken >= self._posted
            phase = loop.phase
            if phase == "idle" and not all_taken:
                phase = "plan"
            times = loop.step_times
            beat = Heartbeat(
                turns=loop.turns, phase=phase, received=self._received, steps=times.count, step_s=times.slowest()
            )
        told = self._try_to_send(self._encoder.encode(beat))  # else the front end takes nothing: again next time
        if beat.phase == "idle" and told:
            faulthandler.cancel_dump_traceback_later()
            return None
        # Runs without the GIL: ends a core in which no Python can run any more, even when the parent is gone.
        faulthandler.dump_traceback_later(1.5 * self._hang_timeout_s + self._heartbeat_s, exit=True)
        return time.monotonic() + self._heartbeat_s

    def _die_with_parent(self) -> None:
        shutil.rmtree(self._directory, ignore_errors=True)
        if os.getpgrp() == os.getpid():
            os.killpg(0, signal.SIGKILL)  # compile workers too
        os._exit(1)


def _request_id(frame: bytes) -> str:
    """The request that a frame names, or "" where none can be made out."""
    try:
        return msgspec.msgpack.decode(frame, type=_Named).request_id
    except Exception:
        logger.debug("it names no request", exc_info=True)
        return ""


class _Named(msgspec.Struct, frozen=True):
    """Any message that names a request."""

    request_id: str = ""


def stop_on_sigterm(inbox: Inbox) -> None:
    """SIGTERM ends a serving core as `Shutdown` does. A signal handler may call `SimpleQueue.put`: it is reentrant."""

    def handle(signum: int, frame: object) -> None:
        inbox.put(Shutdown())

    signal.signal(signal.SIGTERM, handle)
