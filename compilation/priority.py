"""Work that gives way: what the kernel is told of processes and threads that nobody's tokens wait for.

Linux shares the CPUs out by session before it looks at a process's niceness (autogroup, `sched(7)`): a process that is
to give way to other sessions has one of its own, whose share is lowered, too. In containers there are no such groups,
and niceness alone counts. Elsewhere only niceness exists, and threads have none.
"""

from __future__ import annotations

import os
import sys
from contextlib import suppress
from pathlib import Path

LOW = 10
"""niceness: a tenth of a busy core, so that it goes on beside a server that is busy from its first second on"""
LOWEST = 19
"""what nobody else wants"""


def lower_thread(native_id: int, niceness: int) -> None:
    """With it the threads and processes that it starts from now on."""
    if sys.platform == "linux":
        _lower(native_id, niceness)


def lower_session(pid: int, niceness: int) -> bool:
    """Of a process that leads a session and is alone there. False: the kernel takes such a change from us ten times a
    second, and this one is to be tried again."""
    _lower(pid, niceness)
    try:
        Path(f"/proc/{pid}/autogroup").write_text(str(niceness))
    except BlockingIOError:
        return False
    except OSError:  # no such groups, or it has ended
        return True
    return True


def _lower(task: int, niceness: int) -> None:
    with suppress(OSError):
        os.setpriority(os.PRIO_PROCESS, task, niceness)
