"""The process of one rank on this host: start it, see whether it runs, reap it."""

from __future__ import annotations

import contextlib
import os
import socket
import subprocess
from collections.abc import Sequence

import msgspec

from engine.child import ChildOutput, exit_cause, is_stopped, python_command
from engine.executor.frames import WorkerStart
from engine.executor.worker_link import WorkerLink

_LAST_WORDS_S = 0.2
"""how long the output of a process that has ended is waited for: a descendant may hold the pipe open"""


class WorkerProcess:
    """Dies with the thread that started it."""

    def __init__(self, start: WorkerStart, descriptors: Sequence[int]) -> None:
        """`descriptors`: those that `start` names; the caller keeps them. Raises OSError."""
        # In our session: whoever ends this process with its group ends them together.
        self._process = subprocess.Popen(
            python_command("engine.executor.worker"),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            pass_fds=descriptors,
        )
        self.pid = self._process.pid
        self.sentinel = os.pidfd_open(self.pid)
        """readable when the process has ended"""
        assert self._process.stdin is not None and self._process.stdout is not None
        self._output = ChildOutput(self._process.stdout, f"rank-{start.rank}-stderr", start.log_mark)
        with contextlib.suppress(BrokenPipeError):  # the sentinel tells of one that died at once
            self._process.stdin.write(msgspec.json.encode(start) + b"\n")
            self._process.stdin.close()

    def is_stopped(self) -> bool:
        return is_stopped(self.pid)

    def kill(self) -> None:
        self._process.kill()

    @property
    def left(self) -> bool:
        """It has ended without an error, once it was reaped."""
        return self._process.returncode == 0

    def reap(self) -> str:
        """Wait for the end, free everything; why it has ended, in a line."""
        status = self._process.wait()
        self._output.close(_LAST_WORDS_S)
        os.close(self.sentinel)
        return exit_cause(status, self._output.tail)


class WorkerHandle:
    """A `Handle` of a worker that this process has started."""

    def __init__(self, start: WorkerStart, descriptors: Sequence[int]) -> None:
        """`start.socket_fd` is filled in. The worker dies with the calling thread."""
        self.rank = start.rank
        self.stopped_looks = 0
        ours, theirs = socket.socketpair()
        try:
            start = msgspec.structs.replace(start, socket_fd=theirs.fileno())
            self._process = WorkerProcess(start, (theirs.fileno(), *descriptors))
        except BaseException:
            ours.close()
            raise
        finally:
            theirs.close()
        self.link = WorkerLink(ours)
        self.pid = self._process.pid

    @property
    def name(self) -> str:
        return f"rank {self.rank} (process {self.pid})"

    @property
    def sentinel(self) -> int:
        return self._process.sentinel

    def has_ended(self) -> bool:
        return True

    def is_stopped(self) -> bool:
        return self._process.is_stopped()

    def kill(self) -> None:
        self._process.kill()

    def reap(self) -> str:
        cause = self._process.reap()
        self.link.close()
        return cause
