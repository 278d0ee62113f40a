"""The cores of several front ends: each request goes on as if its front end were alone with them.

One event loop has the sockets; no waiting but for what comes. What a front end that has gone had is aborted.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor

import msgspec
import zmq

from engine import errors
from engine.config import EngineConfig
from engine.core.client import CoreClient
from engine.core.supervision import SocketDirectory
from engine.core.wire import (
    AbortRequests,
    AddRequest,
    CoreReady,
    CoreStats,
    Delta,
    SequenceDelta,
    StepOutputs,
    StepTaken,
    ToCore,
    TokenDeltas,
    Vocabulary,
)
from engine.errors import ConfigError, CoreDiedError, EngineError, QueueFullError
from engine.front_ends.questions import Questions
from engine.front_ends.wire import (
    Answer,
    Changed,
    CoresState,
    Done,
    FromFrontEnd,
    FromHub,
    Joined,
    Order,
    Question,
    Serves,
    ToHub,
)
from engine.replicas.client import ReplicatedClient
from engine.sleeping import ready_with, sleeper

logger = logging.getLogger(__name__)

LOOK_S = 0.25
"""how often front ends learn what they are not told with their outputs: counts of a core that has nothing for them,
and whether it makes progress"""
ANSWER_S = 5.0
"""for front ends to say what another one asks"""
_MOST_ORDERS = 16
"""that are carried out one by one"""
_AT_ONCE = 256
"""messages of front ends, until others have a turn"""


class _FrontEnd(msgspec.Struct, eq=False):
    sender: zmq.Socket[bytes]
    serves: bool = False
    lacks_stats: bool = False


class Hub:
    """Belongs to the event loop that runs it. Front ends have numbers that are not used again."""

    look_s = LOOK_S

    def __init__(self, config: EngineConfig, client: CoreClient, directory: SocketDirectory) -> None:
        """`client` and `directory` stay the caller's; `address` of each front end is in it."""
        self.config = config
        """by which cores serve now"""
        self._client, self._directory = client, directory
        self._ready: CoreReady | None = None
        self._orders: set[asyncio.Task[None]] = set()
        self._most_frames = config.limits.frames
        self._receiver = self._listen()
        self._encoder = msgspec.msgpack.Encoder()
        self._decoder = msgspec.msgpack.Decoder(FromFrontEnd)
        self._front_ends: dict[int, _FrontEnd] = {}
        self._owners: dict[str, int] = {}
        """front ends by the sequences that they wait for"""
        self._questions = Questions(self._tell)
        self._lost: set[int] = set()
        self._carrying_out = ThreadPoolExecutor(max_workers=1, thread_name_prefix="order")
        self._stats = CoreStats()
        self._state = CoresState()
        self._vocabulary_is_known = False
        self.on_serves: Callable[[int], None] = lambda number: None
        """a front end takes requests"""
        self.on_stuck: Callable[[int], None] = lambda number: None
        """one takes nothing any more, and is to be ended"""

    def address(self, number: int) -> str:
        """That a front end binds."""
        return f"{self._directory.from_core}-{number}"

    async def run(self, ready: CoreReady) -> CoreDiedError:
        """The client has started; until no core serves any more, which every front end is told; returns why. May be
        cancelled."""
        self._ready = ready
        self._stats = CoreStats(compiling=ready.compiling, kv_blocks_total=ready.num_blocks)
        looking = asyncio.create_task(self._look())
        self._watch(True)
        self._take_in()
        try:
            while True:
                self._tell_all(await self._client.recv_async())
        except CoreDiedError as error:
            self._tell_state(CoresState(died=str(error)))
            return error
        except Exception as error:
            self._tell_state(CoresState(died=f"what passes requests on to the cores failed: {error!r}"))
            raise
        finally:
            looking.cancel()
            self._watch(False)

    def lost(self, number: int) -> None:
        """A front end has gone: nobody waits for what it had."""
        self._lost.add(number)
        front_end = self._front_ends.pop(number, None)
        if front_end is not None:
            front_end.sender.close()
        names = [name for name, owner in self._owners.items() if owner == number]
        self._abort(number, names)
        self._questions.lost(number)

    def close(self) -> None:
        self._carrying_out.shutdown(wait=False, cancel_futures=True)
        self._context.destroy(linger=0)

    # -- sockets -----------------------------------------------------------------------------------------------------

    def _listen(self) -> zmq.Socket[bytes]:
        self._context = zmq.Context[zmq.Socket[bytes]]()
        receiver = self._socket(zmq.PULL)
        receiver.bind(self._directory.to_core)
        return receiver

    def _connect(self, number: int) -> zmq.Socket[bytes]:
        sender = self._socket(zmq.PUSH)
        sender.connect(self.address(number))  # this side connects, so that there is a queue at once
        return sender

    def _watch(self, watches: bool) -> None:
        """Whether `_take_in` is called when something has come."""
        loop = asyncio.get_running_loop()
        if watches:
            loop.add_reader(self._receiver.fileno(), self._take_in)
        else:
            loop.remove_reader(self._receiver.fileno())

    def _socket(self, kind: int) -> zmq.Socket[bytes]:
        socket = self._context.socket(kind)
        socket.setsockopt(zmq.LINGER, 0)
        socket.setsockopt(zmq.SNDHWM, self._most_frames)
        socket.setsockopt(zmq.RCVHWM, self._most_frames)
        return socket

    # -- from front ends ---------------------------------------------------------------------------------------------

    def _take_in(self) -> None:
        """The descriptor of the socket signals changes, not states: until nothing is left."""
        for _ in range(_AT_ONCE):
            try:
                frame = self._receiver.recv(zmq.NOBLOCK)
            except zmq.Again:
                return
            except zmq.ZMQError:  # it was closed
                return
            try:
                received = self._decoder.decode(frame)
                self._take(received.front_end, received.message)
            except Exception:  # of one message: others are to be taken in
                logger.exception("a front end's message was not understood")
        asyncio.get_running_loop().call_soon(self._take_in)

    def _take(self, number: int, message: ToHub) -> None:
        if isinstance(message, Joined):
            if number not in self._lost:
                self._join(number)
        elif number not in self._front_ends:
            return  # its last words
        else:
            match message:
                case Serves():
                    self._front_ends[number].serves = True
                    self.on_serves(number)
                case Question():
                    self._ask(number, message)
                case Answer():
                    self._questions.answered(message.number, number, message.text)
                case Order():
                    task = asyncio.get_running_loop().create_task(self._carry_out(number, message))
                    self._orders.add(task)
                    task.add_done_callback(self._orders.discard)
                case AddRequest():
                    self._add(number, message)
                case AbortRequests():
                    self._abort(number, message.request_ids)
                case Vocabulary():
                    if not self._vocabulary_is_known:  # all have the same, and taking it in takes long
                        self._vocabulary_is_known = True
                        self._send(message)
                case _:
                    self._send(message)

    def _join(self, number: int) -> None:
        self._front_ends[number] = _FrontEnd(self._connect(number))
        assert self._ready is not None, "nothing is taken in before"
        self._tell(number, Changed(self.config, self._ready))
        self._tell(number, self._ready)
        self._tell(number, self._state)
        self._tell(number, StepOutputs(deltas=[], stats=self._stats))

    def _add(self, number: int, message: AddRequest) -> None:
        for name in message.request_ids:
            self._owners[name] = number
        try:
            self._client.send(message)
        except Exception as error:
            if not isinstance(error, EngineError):
                logger.exception("a request failed")
            for name in message.request_ids:
                del self._owners[name]
            kind, after_s = "fault", 1.0
            if isinstance(error, QueueFullError):
                kind, after_s = error.kind, error.retry_after_s
            text = str(error)
            refused: list[Delta] = [
                SequenceDelta(
                    request_id=name, finish_reason="error", error=text, error_kind=kind, retry_after_s=after_s
                )
                for name in message.request_ids
            ]
            self._tell(number, StepOutputs(deltas=refused, stats=self._stats))

    def _abort(self, number: int, names: Iterable[str]) -> None:
        own = [name for name in names if self._owners.get(name) == number]
        for name in own:
            del self._owners[name]
        if own:
            self._send(AbortRequests(request_ids=own))

    def _send(self, message: ToCore) -> None:
        try:
            self._client.send(message)
        except EngineError as error:  # a core that is dead is the receiver's to find
            logger.warning("the cores were not told: %s", str(error).rpartition("\n")[2])

    async def _carry_out(self, number: int, order: Order) -> None:
        """To its end, also where whoever gave it is gone."""
        try:
            if len(self._orders) > _MOST_ORDERS:
                raise ConfigError(f"{_MOST_ORDERS} orders like this one wait already")
            await asyncio.get_running_loop().run_in_executor(self._carrying_out, self._obey, order)
        except Exception as error:
            kind = type(error).__name__ if hasattr(errors, type(error).__name__) else "EngineError"
            self._tell(number, Done(order.number, kind, str(error)))
            return
        if order.config is not None:
            self.config = order.config
            assert self._ready is not None, "nobody has joined before"
            self._ready = await asyncio.to_thread(ready_with, self._ready, order.config)
            for each in list(self._front_ends):
                self._tell(each, Changed(self.config, self._ready))
        self._tell_state(self._state_now())
        self._tell(number, Done(order.number))

    def _obey(self, order: Order) -> None:
        """Raises `ConfigError` where nobody could."""
        if order.what == "scale":
            if not isinstance(self._client, ReplicatedClient) or self.config.parallel.data == 1:
                raise ConfigError("data_parallel_size is 1: only an engine with more replicas is scaled")
            self._client.scale(order.replicas, order.drain_timeout_s)
            return
        cores = sleeper(self._client)
        if order.what == "sleep":
            cores.sleep()
        elif order.what == "change" and order.config is not None:
            cores.change(order.config)
        else:
            cores.wake_up(order.config)

    def _ask(self, number: int, question: Question) -> None:
        """All that serve, and the one that asks."""
        whom = {each for each, front_end in self._front_ends.items() if front_end.serves or each == number}
        own = self._questions.ask(number, question, whom)
        asyncio.get_running_loop().call_later(ANSWER_S, self._questions.end, own)

    # -- to front ends -----------------------------------------------------------------------------------------------

    def _tell_all(self, outputs: StepOutputs) -> None:
        self._stats = outputs.stats
        news = self._divided(outputs.deltas)
        counts_steps = min((number for number, each in self._front_ends.items() if each.serves), default=0)
        for number, front_end in list(self._front_ends.items()):
            step: StepTaken | None = outputs.step if number == counts_steps else None
            if number in news or step is not None:
                front_end.lacks_stats = False
                self._tell(number, StepOutputs(deltas=news.get(number, []), stats=outputs.stats, step=step))
            else:
                front_end.lacks_stats = True

    def _divided(self, deltas: Iterable[Delta]) -> dict[int, list[Delta]]:
        """By front end. Of whom nobody waits for nothing is told."""
        news: dict[int, list[Delta]] = {}
        for delta in deltas:
            if isinstance(delta, SequenceDelta):
                number = self._owners.get(delta.request_id)
                if number is None:
                    continue
                news.setdefault(number, []).append(delta)
                if delta.finish_reason is not None:
                    del self._owners[delta.request_id]
                continue
            parts: dict[int, TokenDeltas] = {}
            for name, token in zip(delta.request_ids, delta.token_ids, strict=True):
                number = self._owners.get(name)
                if number is None:
                    continue
                if number not in parts:
                    parts[number] = TokenDeltas(request_ids=[], token_ids=[])
                    news.setdefault(number, []).append(parts[number])
                parts[number].request_ids.append(name)
                parts[number].token_ids.append(token)
        return news

    async def _look(self) -> None:
        while True:
            await asyncio.sleep(self.look_s)
            self._take_in()  # if anything has kept it from that
            for number, front_end in list(self._front_ends.items()):
                if front_end.lacks_stats:
                    front_end.lacks_stats = False
                    self._tell(number, StepOutputs(deltas=[], stats=self._stats))
            if (state := self._state_now()) != self._state:
                self._tell_state(state)

    def _state_now(self) -> CoresState:
        client, stalled = self._client, self._client.stalled()
        if not isinstance(client, ReplicatedClient):
            return CoresState(stalled=stalled)
        each = client.stats_of_each() if self.config.parallel.data > 1 else {}
        return CoresState(
            stalled=stalled, restarting=client.is_restarting, asleep=client.is_sleeping, stats_of_each=each
        )

    def _tell_state(self, state: CoresState) -> None:
        self._state = state
        for number in list(self._front_ends):
            self._tell(number, state)

    def _tell(self, number: int, message: FromHub) -> None:
        front_end = self._front_ends.get(number)
        if front_end is None:
            return
        try:
            front_end.sender.send(self._encoder.encode(message), zmq.NOBLOCK)
        except zmq.Again:  # it takes nothing any more
            logger.error("front end %d has not taken %d messages, and is ended", number, self._most_frames)
            self.on_stuck(number)
