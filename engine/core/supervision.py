"""The parent's grip on a core process: start it, keep its last words, see its death at once, leave nothing behind."""

from __future__ import annotations

import contextlib
import os
import select
import shutil
import signal
import subprocess
import tempfile
from collections.abc import Sequence

import msgspec

from engine.child import ChildOutput, exit_cause, python_command
from engine.config import EngineConfig
from engine.core.process import STACK_DUMP_SIGNAL, CoreStart
from engine.errors import ConfigError

MAX_ADDRESS_BYTES = 100
"""of the 107 that a Unix socket's path may have"""


class SocketDirectory:
    """A fresh directory, readable by this user only, with the addresses of the two sockets."""

    def __init__(self) -> None:
        self.path = tempfile.mkdtemp(prefix="pageloom-")  # mode 0700
        self.to_core = f"ipc://{self.path}/to-core"
        self.from_core = f"ipc://{self.path}/from-core"
        if len(os.fsencode(f"{self.path}/from-core")) > MAX_ADDRESS_BYTES:
            self.remove()
            raise ConfigError(f"{self.path} is too long for a Unix socket: set TMPDIR to a shorter path")

    def remove(self) -> None:
        shutil.rmtree(self.path, ignore_errors=True)


class CoreHandle:
    """One running core process. After `destroy` only `report` and `exit_cause` make sense."""

    def __init__(
        self,
        config: EngineConfig,
        directory: SocketDirectory,
        *,
        executor: str,
        heartbeat_s: float,
        hang_timeout_s: float,
        log_level: int,
        log_mark: str = "",
        cpus: Sequence[int] | None = None,
        group_fd: int | None = None,
    ) -> None:
        start = CoreStart(
            config=config,
            parent_pid=os.getpid(),
            to_core=directory.to_core,
            from_core=directory.from_core,
            directory=directory.path,
            executor=executor,
            heartbeat_s=heartbeat_s,
            hang_timeout_s=hang_timeout_s,
            log_level=log_level,
            log_mark=log_mark,
            cpus=None if cpus is None else tuple(cpus),
            group_fd=group_fd,
        )
        # A session of its own: Ctrl-C reaches the parent only, and the whole group (compile workers) can be ended.
        # Linux shares the CPUs out by session first: whatever the parent's session does, half of them is the core's.
        # Its stdout goes where its stderr goes: the parent's stdout belongs to the user.
        self._process = subprocess.Popen(
            python_command("engine.core.process"),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            start_new_session=True,
            pass_fds=() if group_fd is None else (group_fd,),
        )
        self.pid = self._process.pid
        self.sentinel = os.pidfd_open(self.pid)
        """readable when the process has ended"""
        self._destroyed = False
        assert self._process.stdin is not None and self._process.stdout is not None
        self._output = ChildOutput(self._process.stdout, "core-stderr", log_mark)
        # A core that died at once is reported by the sentinel, not by this pipe.
        with contextlib.suppress(BrokenPipeError):
            self._process.stdin.write(msgspec.json.encode(start) + b"\n")
            self._process.stdin.close()

    def wait_end(self, timeout_s: float) -> bool:
        """True when the process has ended, at once or within the time. Does not reap it."""
        poll = select.poll()
        poll.register(self.sentinel, select.POLLIN)
        return bool(poll.poll(1000 * timeout_s))

    def kill(self) -> None:
        """End the process and its group now; `destroy` reaps it. From any thread and from a signal handler."""
        if not self._destroyed:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self.pid, signal.SIGKILL)

    def dump_stacks(self) -> None:
        """Have every thread's stack written to the core's stderr; needs no cooperation of its interpreter."""
        with contextlib.suppress(ProcessLookupError):
            signal.pidfd_send_signal(self.sentinel, STACK_DUMP_SIGNAL)

    def destroy(self) -> int:
        """Kill what is left of the process and its group, reap it, collect its last words; the exit status."""
        if not self._destroyed:
            self._destroyed = True
            # Signal the group while the leader is not reaped: its number cannot belong to others yet.
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self.pid, signal.SIGKILL)
            self._process.wait()
            self._output.close()
            os.close(self.sentinel)
        return self._process.returncode

    def report(self, cause: str) -> str:
        """An error message whose last line is `cause`; before it, the last lines of the core's stderr."""
        lines = [f"the engine core (process {self.pid}) died"]
        if self._output.tail:
            lines += ["its last output:", *(f"  {line}" for line in list(self._output.tail))]
        return "\n".join([*lines, cause])

    def exit_cause(self) -> str:
        """Why a core that sent no reason is gone, in a line. Call `destroy` first."""
        cause = exit_cause(self._process.returncode, self._output.tail)
        return cause if self._process.returncode else f"{cause}: SIGTERM ends a core in this way"
