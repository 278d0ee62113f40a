"""The driver's grip on the process of one rank: start it, send to it, hear it, see whether it runs, reap it."""

from __future__ import annotations

import contextlib
import os
import socket
import subprocess
import threading
from collections import deque

import msgspec

from engine.child import ChildOutput, exit_cause, is_stopped, python_command
from engine.executor.frames import FrameBuffer, Message, WorkerStart, decode_message

_READ_BYTES = 1 << 16
_LAST_WORDS_S = 0.2
"""how long the output of a process that has ended is waited for: a descendant may hold the pipe open"""


class WorkerHandle:
    """`send` is for the executor's thread, all else for the thread that watches (`worker_watch`)."""

    def __init__(self, start: WorkerStart) -> None:
        """`start.socket_fd` is filled in. The worker dies with the calling thread."""
        self.rank = start.rank
        self.stopped_looks = 0
        """how often in a row it was seen stopped"""
        self.hears = True
        """its socket is open on the other side"""
        self._frames = FrameBuffer()
        self._backlog: deque[memoryview] = deque()
        """what the socket did not take: a worker that computes does not read"""
        self._lock = threading.Lock()
        self.socket, theirs = socket.socketpair()
        self.socket.setblocking(False)
        try:
            start = msgspec.structs.replace(start, socket_fd=theirs.fileno())
            # In our session: whoever ends this process with its group ends them together.
            self._process = subprocess.Popen(
                python_command("engine.executor.worker"),
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                pass_fds=(theirs.fileno(), start.group_fd, *(start.before or ()), *(start.after or ())),
            )
        except BaseException:
            self.socket.close()
            raise
        finally:
            theirs.close()
        self.pid = self._process.pid
        self.sentinel = os.pidfd_open(self.pid)
        """readable when the process has ended"""
        assert self._process.stdin is not None and self._process.stdout is not None
        self._output = ChildOutput(self._process.stdout, f"rank-{self.rank}-stderr", start.log_mark)
        with contextlib.suppress(BrokenPipeError):  # the sentinel tells of one that died at once
            self._process.stdin.write(msgspec.json.encode(start) + b"\n")
            self._process.stdin.close()

    @property
    def name(self) -> str:
        return f"rank {self.rank} (process {self.pid})"

    def send(self, frame: bytes) -> bool:
        """Never waits. False: some of it is left for `flush`. Whether the worker has gone, the sentinel tells."""
        with self._lock:
            if self.hears:
                self._backlog.append(memoryview(frame))
                self._send_backlog()
            return not self._backlog

    def flush(self) -> None:
        """The socket takes bytes again."""
        with self._lock:
            self._send_backlog()

    @property
    def has_backlog(self) -> bool:
        return bool(self._backlog)

    def _send_backlog(self) -> None:
        while self._backlog:
            first = self._backlog[0]
            try:
                sent = self.socket.send(first)
            except BlockingIOError:
                return
            except OSError:  # it has gone
                self._backlog.clear()
                self.hears = False
                return
            if sent == len(first):
                self._backlog.popleft()
            else:
                self._backlog[0] = first[sent:]

    def receive(self) -> list[Message]:
        """What has come, without waiting."""
        while self.hears:
            try:
                data = self.socket.recv(_READ_BYTES)
            except BlockingIOError:
                break
            except OSError:
                data = b""
            if not data:
                self.hears = False
            self._frames.feed(data)
        messages: list[Message] = []
        while (frame := self._frames.next()) is not None:
            messages.append(decode_message(frame))
        return messages

    def is_stopped(self) -> bool:
        return is_stopped(self.pid)

    def kill(self) -> None:
        self._process.kill()

    def reap(self) -> str:
        """Wait for the end, free everything; why it has ended, in a line."""
        status = self._process.wait()
        self._output.close(_LAST_WORDS_S)
        os.close(self.sentinel)
        with self._lock:
            self.hears = False
            self._backlog.clear()
            self.socket.close()
        return exit_cause(status, self._output.tail)
