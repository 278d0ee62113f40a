"""The core process: `python -m engine.core.process`, with a `CoreStart` as one line of JSON on stdin.

A plain subprocess, so that nothing is pickled and a user's script needs no `__main__` guard. It never outlives the
parent that `CoreStart` names.
"""

from __future__ import annotations

import faulthandler
import gc
import logging
import os
import signal
import sys
import traceback
from collections.abc import Callable
from types import FrameType
from typing import TYPE_CHECKING, NoReturn

import msgspec

from engine import errors
from engine.child import name_process
from engine.config import EngineConfig
from engine.core.wire import CoreFailed
from engine.observability.logs import TEXT, JsonFormatter, TextFormatter, log_uncaught

if TYPE_CHECKING:
    from engine.core.mailbox import Mailbox

logger = logging.getLogger(__name__)

STACK_DUMP_SIGNAL = signal.SIGUSR1

SWITCH_INTERVAL_S = 0.0002
"""How long the loop may keep the interpreter while the executor's thread wants to launch work. Python's default, 5 ms,
would let a busy host side stall the device for as long as a whole step takes."""


class CoreStart(msgspec.Struct, frozen=True, kw_only=True):
    """All that a core process needs to know; written by the parent, never by anything that a request carries."""

    config: EngineConfig
    parent_pid: int
    to_core: str
    """address that the core binds"""
    from_core: str
    """address that the parent has bound"""
    directory: str
    """private directory of both; the core removes it when its parent died"""
    executor: str
    """"module:callable" """
    heartbeat_s: float
    hang_timeout_s: float
    log_level: int
    log_mark: str = ""
    """the log is JSON, each line behind this (`JsonFormatter`); "": it is text"""
    cpus: tuple[int, ...] | None = None
    """the logical ones that this process and all that it starts may run on; None: wherever the parent may"""
    group_fd: int | None = None
    """the memory that replicas share which take steps together"""


class _TerminatedError(BaseException):
    """SIGTERM during the start."""


def main() -> NoReturn:
    """Run one core to its end: exit status 0 after `Shutdown` or SIGTERM, 1 after an error that was reported."""
    start = msgspec.json.decode(sys.stdin.buffer.readline(), type=CoreStart)
    with open(os.devnull) as nothing:
        os.dup2(nothing.fileno(), sys.stdin.fileno())
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for the parent to act on
    signal.signal(signal.SIGTERM, _terminate)
    faulthandler.enable()
    faulthandler.register(STACK_DUMP_SIGNAL, all_threads=True)
    parallel = start.config.parallel
    name = "core" if parallel.data == 1 else f"replica {parallel.data_rank}"
    name_process("pageloom " + name)
    write_log(name, start.log_level, start.log_mark)
    sys.setswitchinterval(SWITCH_INTERVAL_S)
    if start.cpus is not None:
        os.sched_setaffinity(0, start.cpus)
    _run(start)


def write_log(process: str, level: int, mark: str, request_id: Callable[[], str | None] = lambda: None) -> None:
    """To stderr, as whoever started this process asks for. What this one starts marks its entries alike. `request_id`:
    as `JsonFormatter`'s."""
    handler = logging.StreamHandler()
    if mark:
        handler.setFormatter(JsonFormatter(process, request_id, mark=mark, child_mark=mark))
        log_uncaught()
    else:
        handler.setFormatter(TextFormatter(TEXT.replace("%(name)s", process)))
    logging.basicConfig(level=level, handlers=[handler])


def _run(start: CoreStart) -> NoReturn:
    from engine.core.begun import BegunLog
    from engine.core.mailbox import Mailbox, stop_on_sigterm
    from engine.core.start import build_core, load_executor

    parent_fd = os.pidfd_open(start.parent_pid)
    if os.getppid() != start.parent_pid:
        os._exit(1)  # the parent died before we could watch it
    mailbox = Mailbox(
        start.to_core,
        start.from_core,
        start.directory,
        parent_fd,
        start.heartbeat_s,
        start.hang_timeout_s,
        start.config.limits.frames,
    )
    try:
        executor = load_executor(start.executor, start.config, start.group_fd)
        begun = BegunLog(start.directory).add
        loop, ready = build_core(start.config, executor, mailbox.inbox, post=mailbox.post, begun=begun)
        gc.collect()
        gc.freeze()  # what the start made stays: a collection between two steps need not walk through it
        stop_on_sigterm(mailbox.inbox)
        mailbox.attach(loop)
        mailbox.publish(ready)
        loop.run(mailbox.publish)
        loop.close()
        executor.close()
    except _TerminatedError:
        logger.warning("stopped by SIGTERM while starting")
        _leave(mailbox, 0)
    except BaseException as error:
        # Whatever it is, MemoryError and a library's SystemExit included: the parent learns it before the core is gone.
        mailbox.publish(failure(error))
        _leave(mailbox, 1)
    _leave(mailbox, 0)  # a compilation that was stopped may still be inside torch: the interpreter is not taken down


def _leave(mailbox: Mailbox, status: int) -> NoReturn:
    """Exit without waiting for the executor, whose thread may be in the middle of anything."""
    mailbox.close()
    logging.shutdown()
    os._exit(status)


def failure(error: BaseException) -> CoreFailed:
    """The report of an error; its last line names the error, also where the error's message has several lines."""
    text = "".join(traceback.format_exception(error)).rstrip()
    cause = " ".join(f"{type(error).__name__}: {error}".split())
    if text.rpartition("\n")[2] != cause:
        text = f"{text}\n{cause}"
    ours = isinstance(error, errors.EngineError) and hasattr(errors, type(error).__name__)
    return CoreFailed(traceback=text, kind=type(error).__name__ if ours else None, message=str(error))


def _terminate(signum: int, frame: FrameType | None) -> None:
    raise _TerminatedError


if __name__ == "__main__":
    main()
