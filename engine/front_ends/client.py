"""A front end's side: a `CoreClient` whose cores another process has, which gives them to several front ends."""

from __future__ import annotations

import asyncio
import itertools
import os
import select
import shutil
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future

import msgspec
import zmq

from engine import errors
from engine.config import EngineConfig
from engine.core.outbox import Outbox
from engine.core.sleeper import Sleeper
from engine.core.waiting import wait, wait_async
from engine.core.wire import AddRequest, CoreReady, CoreStats, StepOutputs, ToCore
from engine.errors import CoreDiedError, EngineError
from engine.front_ends.wire import (
    Answer,
    Answers,
    Changed,
    CoresState,
    Done,
    FromFrontEnd,
    FromHub,
    FrontEndStart,
    Joined,
    Order,
    Question,
    Serves,
    ToHub,
)

ANSWER_S = 8.0
"""how long an answer of the others is waited for, after which there is an error"""
_GONE = "the process that has the cores has ended"


class FrontEndClient(Sleeper):
    """See `engine.core.client.CoreClient`."""

    wait_s = 1.0
    """for `engine.core.waiting`: what found no room is tried again then"""

    def __init__(self, start: FrontEndStart) -> None:
        self.number = start.number
        self.config = start.config
        self.answers: dict[str, Callable[[], bytes]] = {}
        """what is told to other front ends, by what they ask"""
        self._start = start
        self._encoder = msgspec.msgpack.Encoder()
        self._decoder: msgspec.msgpack.Decoder[FromHub] = msgspec.msgpack.Decoder(FromHub)
        self._state = CoresState()
        self._kept: deque[StepOutputs] = deque()
        self._compiling = False
        self.on_change: Callable[[EngineConfig, CoreReady], None] = lambda config, ready: None
        """cores have other weights"""
        self._orders: dict[int, Future[Done]] = {}
        self._asked: dict[int, asyncio.Future[Answers]] = {}
        self._numbers = itertools.count()
        self._closed = self._abandoned = False
        self._context: zmq.Context[zmq.Socket[bytes]] | None = None

    def start(self) -> CoreReady:
        """Raises `CoreDiedError` where the hub ends before cores serve."""
        self.sentinel = os.pidfd_open(self._start.parent_pid)
        self._end_of_hub = select.poll()
        self._end_of_hub.register(self.sentinel, select.POLLIN)
        self._context = zmq.Context()
        self.receiver, sender = self._context.socket(zmq.PULL), self._context.socket(zmq.PUSH)
        for socket in (self.receiver, sender):
            socket.setsockopt(zmq.LINGER, 0)
            socket.setsockopt(zmq.SNDHWM, self.config.limits.frames)
            socket.setsockopt(zmq.RCVHWM, self.config.limits.frames)
        self.receiver.bind(self._start.from_hub)
        sender.connect(self._start.to_hub)  # this side connects, so that there is a queue at once
        self._outbox = Outbox(sender, self.config.limits.message("frames"))
        self._post(Joined())
        while not isinstance(message := self._next(), CoreReady):
            if message is None:
                wait([self])
        self._compiling = message.compiling
        return message

    def serves(self) -> None:
        """Requests are taken from now on."""
        self._post(Serves())

    def send(self, message: ToCore) -> None:
        self._check_open()
        self._post(message)

    def recv(self) -> StepOutputs:
        while (outputs := self._poll()) is None:
            wait([self])
        return outputs

    async def recv_async(self) -> StepOutputs:
        while (outputs := self._poll()) is None:
            await wait_async([self])
        return outputs

    def wait_compiled(self) -> None:
        kept: list[StepOutputs] = []
        while self._compiling:
            if (outputs := self._poll()) is not None:
                kept.append(outputs)
            else:
                wait([self])
        self._kept.extend(kept)

    def stalled(self) -> str | None:
        return self._state.stalled

    @property
    def is_restarting(self) -> bool:
        return self._state.restarting

    def stats_of_each(self) -> dict[int, CoreStats]:
        """As `ReplicatedClient`'s, a moment ago."""
        return self._state.stats_of_each

    async def ask(self, about: str) -> Answers:
        """What all front ends say, this one too. Raises `TimeoutError` where one does not. Somebody receives
        meanwhile."""
        number = next(self._numbers)
        future = self._asked[number] = asyncio.get_running_loop().create_future()
        try:
            self._check_open()
            self._post(Question(number, about))
            answers: Answers = await asyncio.wait_for(future, ANSWER_S)
        finally:
            del self._asked[number]
        if answers.missing:
            raise TimeoutError(f"{answers.missing} front ends do not answer")
        return answers

    # -- what is done to cores, by threads that wait for it -----------------------------------------------------------

    @property
    def is_sleeping(self) -> bool:
        return self._state.asleep

    def sleep(self) -> None:
        self._carry_out(Order(next(self._numbers), "sleep"))

    def wake_up(self, config: EngineConfig | None = None) -> None:
        self._carry_out(Order(next(self._numbers), "wake_up", config))

    def change(self, config: EngineConfig) -> None:
        self._carry_out(Order(next(self._numbers), "change", config))

    def scale(self, replicas: int, drain_timeout_s: float | None = None) -> None:
        """As `ReplicatedClient.scale`."""
        order = Order(next(self._numbers), "scale", replicas=replicas, drain_timeout_s=drain_timeout_s)
        self._carry_out(order)

    def _carry_out(self, order: Order) -> None:
        """Raises what it raised where the cores are."""
        done = self._orders[order.number] = Future()
        try:
            self._check_open()
            self._post(order)
            result = done.result()
        finally:
            del self._orders[order.number]
        if result.kind is not None:
            known = getattr(errors, result.kind, EngineError)
            raise known(result.message)

    def abandon(self) -> None:
        self._abandoned = True

    def close(self) -> None:
        """The cores stay."""
        if self._closed or self._context is None:
            return
        self._closed = True
        self._give_up(CoreDiedError("this front end was closed"))
        self._context.destroy(linger=0)
        os.close(self.sentinel)

    def _post(self, message: ToHub) -> None:
        frame = self._encoder.encode(FromFrontEnd(self.number, message))
        self._outbox.send(frame, refusable=isinstance(message, AddRequest))

    def _poll(self) -> StepOutputs | None:
        message = self._kept.popleft() if self._kept else self._next()
        if isinstance(message, StepOutputs):
            self._compiling = message.stats.compiling
            return message
        return None

    def _next(self) -> StepOutputs | CoreReady | None:
        """What has come for whoever receives; None: nothing now."""
        self._check_open()
        self._outbox.flush()
        while True:
            try:
                message = self._decoder.decode(self.receiver.recv(zmq.NOBLOCK))
            except zmq.Again:
                break
            match message:
                case CoresState():
                    self._state = message
                    self._check_open()
                case Question():
                    tell = self.answers.get(message.about)
                    self._post(Answer(message.number, b"" if tell is None else tell()))
                case Answers():
                    if (future := self._asked.get(message.number)) is not None and not future.done():
                        future.set_result(message)
                case Done():
                    if (order := self._orders.get(message.number)) is not None:
                        order.set_result(message)
                case Changed():
                    self.config = message.config
                    self.on_change(message.config, message.ready)
                case _:
                    return message
        if self._end_of_hub.poll(0):
            shutil.rmtree(self._start.directory, ignore_errors=True)
            self._state = CoresState(died=_GONE)
            self._check_open()
        return None

    def _check_open(self) -> None:
        if self._state.died is not None:
            self._give_up(error := CoreDiedError(self._state.died))
            raise error
        if self._closed or self._abandoned or self._context is None:
            raise CoreDiedError("the core is not running: not started, or closed")

    def _give_up(self, error: CoreDiedError) -> None:
        """Whoever waits for an order's end."""
        for order in list(self._orders.values()):
            if not order.done():
                order.set_exception(error)
