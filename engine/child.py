"""Python processes that this one starts: how they begin, what they write, why they are gone."""

from __future__ import annotations

import json
import os
import signal
import sys
import threading
import time
from collections import deque
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import IO

from engine.observability.logs import last_words

TAIL_LINES = 40

# The child imports from where the parent does, and not from the directory the user happens to be in (-P).
_BOOT = "import json, sys; sys.path[:] = json.loads(sys.argv[1]); del sys.argv[1:]; from {module} import main; main()"


def python_command(module: str) -> list[str]:
    """The command line of a process that runs the `main` of `module`: nothing is forked, nothing pickled."""
    return [sys.executable, "-P", "-c", _BOOT.format(module=module), json.dumps(sys.path)]


def name_process(name: str) -> None:
    """As `ps`, `top` and `pgrep` show this one: 15 bytes of it."""
    with suppress(OSError):
        Path("/proc/self/comm").write_text(name)


def process_age_s() -> float:
    """Since this one was started, imports and all."""
    began = int(Path("/proc/self/stat").read_text().rpartition(")")[2].split()[19])  # field 22
    return time.clock_gettime(time.CLOCK_BOOTTIME) - began / os.sysconf("SC_CLK_TCK")


def is_stopped(pid: int) -> bool:
    """By SIGSTOP and its like; a debugger's trace stop is none."""
    try:
        stat = Path(f"/proc/{pid}/stat").read_text()
    except OSError:
        return False
    return stat.rpartition(")")[2].split()[0] == "T"


class ChildOutput:
    """What a child writes: passed on to our own stderr by a thread; the last lines are kept."""

    def __init__(self, stream: IO[bytes], name: str, log_mark: str = "") -> None:
        """`log_mark` precedes those lines that are entries of a JSON log (`JsonFormatter`)."""
        self.tail: deque[str] = deque(maxlen=TAIL_LINES)
        self._stream = stream
        self._log_mark = log_mark
        self._thread = threading.Thread(target=self._pump, name=name, daemon=True)
        self._thread.start()

    def close(self, timeout_s: float = 1.0) -> None:
        """Waits for the rest; a descendant of a child that has ended may hold the pipe open for longer."""
        self._thread.join(timeout_s)
        if not self._thread.is_alive():
            self._stream.close()

    def _pump(self) -> None:
        passes = True
        for line in self._stream:
            self.tail += last_words(line.decode(errors="replace").rstrip(), self._log_mark)
            if passes:
                try:
                    os.write(2, line)
                except OSError:
                    passes = False  # our own stderr is closed; the tail is still kept


def exit_cause(status: int, tail: Sequence[str], saves: str = "lower --kv-cache-memory") -> str:
    """Why a process that gave no reason is gone, in a line. `status`: as `Popen.returncode`; `saves`: what makes such
    a process need less memory."""
    if status < 0:
        name = signal.Signals(-status).name if -status in set(signal.Signals) else "unknown"
        hint = f" (the out-of-memory killer does this: {saves})" if name == "SIGKILL" else ""
        return f"killed by signal {-status} ({name}){hint}"
    if status == 0:
        return "exited with status 0, unasked"
    last = f": {tail[-1].strip()}" if tail else ""
    return f"exited with status {status}{last}"
