"""The parent's grip on a core process: start it, keep its last words, see its death at once, leave nothing behind."""

from __future__ import annotations

import contextlib
import json
import os
import select
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
from collections import deque

import msgspec

from engine.config import EngineConfig
from engine.core.process import STACK_DUMP_SIGNAL, CoreStart
from engine.errors import ConfigError
from engine.observability.logs import last_words

TAIL_LINES = 40
MAX_ADDRESS_BYTES = 100
"""of the 107 that a Unix socket's path may have"""

# The child imports from where the parent does, and not from the directory the user happens to be in (-P).
_BOOT = (
    "import json, sys; sys.path[:] = json.loads(sys.argv[1]); del sys.argv[1:]; "
    "from engine.core.process import main; main()"
)


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
        )
        # A session of its own: Ctrl-C reaches the parent only, and the whole group (compile workers) can be ended.
        # Linux shares the CPUs out by session first: whatever the parent's session does, half of them is the core's.
        # Its stdout goes where its stderr goes: the parent's stdout belongs to the user.
        self._process = subprocess.Popen(
            [sys.executable, "-P", "-c", _BOOT, json.dumps(sys.path)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
        self.pid = self._process.pid
        self.sentinel = os.pidfd_open(self.pid)
        """readable when the process has ended"""
        self._log_mark = log_mark
        self._destroyed = False
        self._tail: deque[str] = deque(maxlen=TAIL_LINES)
        self._pump = threading.Thread(target=self._pump_output, name="core-stderr", daemon=True)
        self._pump.start()
        assert self._process.stdin is not None
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
            self._pump.join(timeout=1.0)  # a descendant that left the group may hold the pipe open
            os.close(self.sentinel)
            if self._process.stdout is not None and not self._pump.is_alive():
                self._process.stdout.close()
        return self._process.returncode

    def report(self, cause: str) -> str:
        """An error message whose last line is `cause`; before it, the last lines of the core's stderr."""
        lines = [f"the engine core (process {self.pid}) died"]
        if self._tail:
            lines += ["its last output:", *(f"  {line}" for line in list(self._tail))]
        return "\n".join([*lines, cause])

    def exit_cause(self) -> str:
        """Why a core that sent no reason is gone, in a line. Call `destroy` first."""
        status = self._process.returncode
        if status < 0:
            name = signal.Signals(-status).name if -status in set(signal.Signals) else "unknown"
            hint = " (the out-of-memory killer does this: lower --kv-cache-memory)" if name == "SIGKILL" else ""
            return f"killed by signal {-status} ({name}){hint}"
        if status == 0:
            return "exited with status 0, unasked: SIGTERM ends a core in this way"
        last = f": {self._tail[-1].strip()}" if self._tail else ""
        return f"exited with status {status}{last}"

    def _pump_output(self) -> None:
        assert self._process.stdout is not None
        passes = True
        for line in self._process.stdout:
            self._tail += last_words(line.decode(errors="replace").rstrip(), self._log_mark)
            if passes:
                try:
                    os.write(2, line)
                except OSError:
                    passes = False  # the parent's stderr is closed; the tail is still kept
