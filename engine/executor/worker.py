"""The process of one rank that is not the driver's: `main`, with a `WorkerStart` as one line of JSON on stdin.

It never outlives the driver, whatever its main thread is doing: a thread waits for the driver's end, and the kernel
kills it with the thread that started it. Nothing heavy is imported before it can tell the driver what fails.
"""

from __future__ import annotations

import contextlib
import ctypes
import faulthandler
import logging
import os
import select
import signal
import sys
import threading
from typing import NoReturn

import msgspec

from engine.child import name_process
from engine.core.process import STACK_DUMP_SIGNAL, SWITCH_INTERVAL_S, failure, write_log
from engine.errors import RANK_GRACE_S, RankLostError
from engine.executor.driver_link import DriverLeftError, DriverLink
from engine.executor.frames import WorkerStart

logger = logging.getLogger(__name__)

_PR_SET_PDEATHSIG = 1


def main() -> NoReturn:
    """Run one rank to its end: exit status 0 after `Close`, 1 after an error that was told, or without a driver."""
    start = msgspec.json.decode(sys.stdin.buffer.readline(), type=WorkerStart)
    with open(os.devnull) as nothing:
        os.dup2(nothing.fileno(), sys.stdin.fileno())
    _die_with(start.driver_pid)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for the front end to act on
    faulthandler.enable()
    faulthandler.register(STACK_DUMP_SIGNAL, all_threads=True)
    name_process(f"pageloom rank {start.rank}")
    write_log(f"rank {start.rank}", start.log_level, start.log_mark)
    sys.setswitchinterval(SWITCH_INTERVAL_S)
    _run(start, DriverLink(start.socket_fd))


def _run(start: WorkerStart, link: DriverLink) -> NoReturn:
    try:
        from engine.executor.rank import Rank

        Rank(start, link).run()
    except DriverLeftError:
        _leave(1)
    except BaseException as error:
        if link.is_asked_to_leave(RANK_GRACE_S if isinstance(error, RankLostError) else 0):
            _leave(0)  # what failed was interrupted for that
        # Told first: the others wait for this rank. Whatever it is, a library's SystemExit included.
        with contextlib.suppress(OSError):
            link.tell(failure(error))
        logger.error("rank %d failed", start.rank, exc_info=error)
        _leave(1)
    _leave(0)


def _die_with(driver_pid: int) -> None:
    """Raises `ProcessLookupError` where it has gone already."""
    driver = os.pidfd_open(driver_pid)
    libc = ctypes.CDLL(None, use_errno=True)
    libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)  # also while the interpreter is held by native code
    if os.getppid() != driver_pid:
        os._exit(1)

    def wait() -> None:
        poll = select.poll()
        poll.register(driver, select.POLLIN)
        poll.poll()
        os._exit(1)

    threading.Thread(target=wait, name="driver-end", daemon=True).start()


def _leave(status: int) -> NoReturn:
    """Without taking the interpreter down: threads may be in the middle of anything."""
    logging.shutdown()
    sys.stdout.flush()
    os._exit(status)
