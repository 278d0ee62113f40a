"""Waiting for one of several cores: in a plain thread, or on an event loop."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Protocol

import zmq

_NOBODY_S = 60.0


class Source(Protocol):
    """What may have something to tell."""

    @property
    def receiver(self) -> zmq.Socket[bytes]: ...

    @property
    def sentinel(self) -> int:
        """A descriptor that is readable when its process has ended."""
        ...

    @property
    def wait_s(self) -> float:
        """Until it has to be looked at, whatever has come."""
        ...


def wait(sources: Sequence[Source], wake: int | None = None, most_s: float | None = None) -> None:
    """Until one of them may have something to tell, or the descriptor `wake` is readable; at most that long."""
    poller = zmq.Poller()
    for source in sources:
        poller.register(source.receiver, zmq.POLLIN)
        poller.register(source.sentinel, zmq.POLLIN)
    if wake is not None:
        poller.register(wake, zmq.POLLIN)
    poller.poll(int(1000 * _least(sources, most_s)) + 1)


def _least(sources: Sequence[Source], most_s: float | None) -> float:
    return min([*(source.wait_s for source in sources), _NOBODY_S if most_s is None else most_s])


async def wait_async(sources: Sequence[Source], wake: int | None = None, most_s: float | None = None) -> None:
    """As `wait`. ZeroMQ's descriptors signal changes, not states: to be called only after a look at each that found
    nothing."""
    loop = asyncio.get_running_loop()
    woken = loop.create_future()

    def end() -> None:
        if not woken.done():
            woken.set_result(None)

    descriptors = [each for source in sources for each in (source.receiver.fileno(), source.sentinel)]
    if wake is not None:
        descriptors.append(wake)
    for descriptor in descriptors:
        loop.add_reader(descriptor, end)
    timer = loop.call_later(_least(sources, most_s), end)
    try:
        await woken
    finally:
        timer.cancel()
        for descriptor in descriptors:
            loop.remove_reader(descriptor)
