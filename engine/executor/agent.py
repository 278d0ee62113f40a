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
from engine.executor.agent_frames import VERSION, AgentStream, Ended, Hello, Spawn, Spawned, Stopped
from engine.executor.connections import Address, Listener, Purpose, connect, own_host
from engine.executor.worker_handle import WorkerProcess

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
        driver.tell(Hello(VERSION, boot_id(), (stream.getsockname()[0], listener.port)))
        try:
            spawn = _until(driver, driver.of_driver)
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


def _start(task: AgentTask, driver: AgentStream, listener: Listener, spawn: Spawn) -> WorkerProcess:
    secret, rank = bytes.fromhex(task.secret), task.rank
    with ExitStack() as held:  # until the worker has them
        frames = held.enter_context(connect(task.driver, secret, Purpose("frames", rank), task.timeout_s))
        descriptors, start = [frames.fileno()], spawn.start
        start = msgspec.structs.replace(start, driver_pid=os.getpid(), socket_fd=frames.fileno())
        if spawn.memory is not None:
            memory = os.open("/proc/{}/fd/{}".format(*spawn.memory), os.O_RDWR | os.O_CLOEXEC)
            held.callback(os.close, memory)
            descriptors.append(memory)
            start = msgspec.structs.replace(start, group_fd=memory)
        else:
            streams = {rank_of: held.enter_context(each) for rank_of, each in _peers(task, driver, listener, spawn)}
            numbers = {other: stream.fileno() for other, stream in streams.items()}
            descriptors += numbers.values()
            start = msgspec.structs.replace(start, peers=tuple(numbers.get(i, -1) for i in range(start.size)))
        worker = WorkerProcess(start, descriptors)
    driver.tell(Spawned(worker.pid))
    return worker


def _peers(task: AgentTask, driver: AgentStream, listener: Listener, spawn: Spawn) -> list[tuple[int, socket]]:
    """By rank: those below are called, those above call."""
    secret, deadline = bytes.fromhex(task.secret), time.monotonic() + task.timeout_s
    own = Purpose("sums", task.rank)
    found = {rank: connect(spawn.peers[rank], secret, own, task.timeout_s) for rank in range(task.rank)}

    def all_there() -> dict[int, socket] | None:
        while (joined := listener.next(0)) is not None:
            found[joined.purpose.rank] = joined.stream
        if time.monotonic() > deadline:
            raise EngineError(f"of {spawn.start.size - 1} other ranks {len(found)} came within {task.timeout_s:g} s")
        return found if len(found) == spawn.start.size - 1 else None

    return list(_until(driver, all_there).items())


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
