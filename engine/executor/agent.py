"""Beside a rank on another host than the driver's, or under another parent: it starts the worker and watches it.

Steps do not go through it: it opens the worker's streams, which the worker inherits. It leaves with the worker, and
ends the worker when the driver has gone, is lost or lets go of it.
"""

from __future__ import annotations

import os
import select
import sys
import time
from collections.abc import Callable
from contextlib import ExitStack, suppress
from pathlib import Path
from socket import socket
from typing import TypeVar

import msgspec

from engine.errors import EngineError, in_words
from engine.executor.agent_frames import (
    VERSION,
    AgentStream,
    Ended,
    Hello,
    Memory,
    Share,
    Shared,
    Spawn,
    Spawned,
    Stopped,
)
from engine.executor.connections import Address, Listener, Purpose, connect, own_host
from engine.executor.frames import RankEnds, StreamKind
from engine.executor.worker_handle import WorkerProcess
from engine.parallel.group_memory import SLOT_BYTES, allocate

T = TypeVar("T")

LOOK_S = 0.2
"""how often it looks whether the worker was stopped by a signal"""


class AgentTask(msgspec.Struct, frozen=True):
    """All that an agent needs to know."""

    rank: int
    driver: Address
    secret: str
    """hexadecimal"""
    timeout_s: float
    """how long others are waited for"""
    node: str
    """where it runs: ranks of one node see each other's processes, and may share memory"""


def boot_id() -> str:
    """Which machine this is, until it starts again."""
    return Path("/proc/sys/kernel/random/boot_id").read_text().strip()


def serve_rank(task: AgentTask) -> Ended:
    """Until the rank has ended. The worker dies with the calling thread. Raises `EngineError` where there is no
    driver."""
    secret = bytes.fromhex(task.secret)
    with ExitStack() as held:
        listener = Listener(own_host(task.driver), secret)
        held.callback(listener.close)
        stream = connect(task.driver, secret, Purpose("agent", task.rank), task.timeout_s)
        held.callback(stream.close)
        driver = AgentStream(stream)
        driver.tell(Hello(VERSION, boot_id(), task.node, (stream.getsockname()[0], listener.port)))
        try:
            spawn = _until(driver, lambda: _spawn(driver, held))
            worker = _start(task, driver, listener, spawn)
        except _DriverLeftError as error:
            return Ended(str(error))
        except Exception as error:
            cause = str(error) if isinstance(error, EngineError) else in_words(error)
            ended = Ended(f"it could not be started: {cause}")
            with suppress(OSError):
                driver.tell(ended)
            return ended
        listener.close()
        return _watch(driver, worker)


def main() -> None:
    """With an `AgentTask` as one line of JSON on stdin."""
    task = msgspec.json.decode(sys.stdin.buffer.readline(), type=AgentTask)
    sys.stderr.write(f"rank {task.rank} has ended: {serve_rank(task).cause}\n")


class _DriverLeftError(Exception):
    pass


def _until(driver: AgentStream, found: Callable[[], T | None]) -> T:
    """What is found, looked for whenever something has come of the driver, and now and then."""
    poll = select.poll()
    poll.register(driver, select.POLLIN)
    while (what := found()) is None:
        if driver.lost is not None:
            raise _DriverLeftError(f"the driver has gone: {driver.lost}")
        poll.poll(1000 * LOOK_S)
        driver.read()
    return what


def _spawn(driver: AgentStream, held: ExitStack) -> Spawn | None:
    """The driver's order, once it has come; what it asks for before is done."""
    match driver.of_driver():
        case Share(ranks=ranks):
            memory = allocate(ranks, SLOT_BYTES)
            held.callback(os.close, memory)
            driver.tell(Shared((os.getpid(), memory)))
            return None
        case order:
            return order


def _start(task: AgentTask, driver: AgentStream, listener: Listener, spawn: Spawn) -> WorkerProcess:
    with ExitStack() as held:  # until the worker has them
        purpose = Purpose("frames", task.rank)
        frames = held.enter_context(connect(task.driver, bytes.fromhex(task.secret), purpose, task.timeout_s))
        streams: dict[StreamKind, dict[int, int]] = {}
        for (kind, rank), stream in _streams(task, driver, listener, spawn).items():
            streams.setdefault(kind, {})[rank] = held.enter_context(stream).fileno()
        memory, parts_memory = (_opened(each, held) for each in (spawn.memory, spawn.parts_memory))
        ends = RankEnds(memory=memory, parts_memory=parts_memory, streams=streams)
        start = msgspec.structs.replace(spawn.start, driver_pid=os.getpid(), socket_fd=frames.fileno(), ends=ends)
        worker = WorkerProcess(start, [frames.fileno(), *ends.descriptors()])
    driver.tell(Spawned(worker.pid))
    return worker


def _opened(memory: Memory | None, held: ExitStack) -> int:
    if memory is None:
        return -1
    descriptor = os.open("/proc/{}/fd/{}".format(*memory), os.O_RDWR | os.O_CLOEXEC)
    held.callback(os.close, descriptor)
    return descriptor


_Streams = dict[tuple[StreamKind, int], socket]


def _streams(task: AgentTask, driver: AgentStream, listener: Listener, spawn: Spawn) -> _Streams:
    """By what they are for, and the rank at the other end."""
    secret, deadline = bytes.fromhex(task.secret), time.monotonic() + task.timeout_s
    found: _Streams = {}
    for each in spawn.streams:
        if each.rank < task.rank:
            own = Purpose(each.kind, task.rank)
            found[each.kind, each.rank] = connect(each.address, secret, own, task.timeout_s)
    missing = {(each.kind, each.rank) for each in spawn.streams} - set(found)

    def all_there() -> _Streams | None:
        while (joined := listener.next(0)) is not None:
            purpose = joined.purpose
            if purpose.kind == "agent" or purpose.kind == "frames" or (purpose.kind, purpose.rank) not in missing:
                joined.stream.close()
                continue
            missing.remove((purpose.kind, purpose.rank))
            found[purpose.kind, purpose.rank] = joined.stream
        if missing and time.monotonic() > deadline:
            ranks = ", ".join(map(str, sorted({rank for _, rank in missing})))
            raise EngineError(f"ranks {ranks} did not reach rank {task.rank} within {task.timeout_s:g} s")
        return None if missing else found

    return _until(driver, all_there)


def _watch(driver: AgentStream, worker: WorkerProcess) -> Ended:
    poll = select.poll()
    poll.register(driver, select.POLLIN)
    poll.register(worker.sentinel, select.POLLIN)
    was_stopped = False
    while True:
        ready = dict(poll.poll(1000 * LOOK_S))
        driver.read()
        if worker.sentinel in ready:
            cause = worker.reap()
            ended = Ended(cause, worker.left)
            with suppress(OSError):
                driver.tell(ended)
            return ended
        if driver.lost is not None:
            worker.kill()
            worker.reap()
            return Ended(f"the driver has gone: {driver.lost}")
        if worker.is_stopped() != was_stopped:
            was_stopped = not was_stopped
            with suppress(OSError):
                driver.tell(Stopped(was_stopped))
