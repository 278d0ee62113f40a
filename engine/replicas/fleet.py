"""Replicas that serve: each request at one of them, what concerns all at all; and what happens when one goes.

What a replica had that is lost, or that is taken away, the others go on with, behind what callers have been given of it
(`deliveries`); where there is none, it waits for the next one that comes. No sockets here but those of the replicas'
clients, and no waiting.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from collections.abc import Sequence
from typing import Generic

import msgspec

from engine.core.wire import (
    AbortRequests,
    AddRequest,
    CoreStats,
    Delta,
    SequenceDelta,
    StepOutputs,
    ToCore,
    UnpinPrefix,
    Vocabulary,
    Wake,
)
from engine.errors import CoreDiedError, EngineError, QueueFullError
from engine.replicas.convicts import Convicts
from engine.replicas.deliveries import Deliveries, News
from engine.replicas.replica import C, Replica
from engine.replicas.router import Place, Router
from engine.replicas.suspects import Suspects
from engine.replicas.together import counters_of, stats_of_all
from engine.replicas.waiting_room import GIVEN_UP, WaitingRoom
from engine.speculation_config import SpeculationConfig

logger = logging.getLogger(__name__)


class Fleet(Generic[C]):
    """From any thread. What a replica tells is taken in by one at a time."""

    def __init__(
        self,
        router: Router,
        in_rounds: bool = False,
        most_waiting: int = 0,
        speculation: SpeculationConfig = SpeculationConfig(),  # noqa: B008  # it never changes
        is_fair: bool = False,
    ) -> None:
        """`in_rounds`: replicas take every step together (`engine.core.rounds`), and none can do without another.
        `most_waiting`, `is_fair`: of the `WaitingRoom`."""
        self.replicas: tuple[Replica[C], ...] = ()
        self.told: deque[StepOutputs] = deque()
        """of requests that nobody could take over"""
        self._lock = threading.RLock()
        self._router = router
        self._in_rounds = in_rounds
        self._wakes = 0
        self._deliveries = Deliveries(speculation)
        self.waiting = WaitingRoom(most_waiting, is_fair, self._deliveries)
        self._suspects = Suspects()
        self._convicts = Convicts()
        self._court: Replica[C] | None = None
        """where suspects are tried: it gets nothing else"""
        self._of_all: dict[str, AddRequest | Vocabulary] = {}
        """what a replica that comes later has to be told: pins by their names, the vocabulary under "" """
        self._gone = counters_of(CoreStats())
        """what those have counted that are no more"""
        self._has_lost = False
        self.resting, self._rests_from = False, 0.0

    def add(self, *replicas: Replica[C]) -> None:
        with self._lock:
            for replica in replicas:
                for message in self._of_all.values():
                    if not (isinstance(message, AddRequest) and self._suspects.is_one(message.request_id)):
                        replica.client.send(message)
                self._router.add(replica.number)
                self.replicas += (replica,)
            if self._court is None:
                self._court = replicas[-1]
                self._router.drain(replicas[-1].number, True)
                self._try_suspect()
            self._move_waiting()

    def forgive(self) -> None:
        """What killed before need not any more."""
        with self._lock:
            self._convicts = Convicts()

    def rest(self, resting: bool) -> None:
        """The last one may go, too, and requests wait for the next one; or nobody rests any more. Nobody has waited for
        too long because others rested."""
        with self._lock:
            if resting:
                self._rests_from = time.monotonic()
            elif self.resting:
                self._deliveries.waited_less(time.monotonic() - self._rests_from)
            self.resting = resting

    def drain(self, replica: Replica[C]) -> None:
        """It gets no more requests, unless it becomes the last one. One that was lost is ignored."""
        with self._lock:
            if replica in self.replicas:
                self._drain(replica, True)

    def is_idle(self, number: int) -> bool:
        """No request that was sent there goes on."""
        with self._lock:
            return all(each.number != number for each in self.replicas) or self._router.is_idle(number)

    def send(self, message: ToCore) -> None:
        """As `CoreClient.send`. What is `told` is to be looked at then."""
        with self._lock:
            match message:
                case AddRequest():
                    self._add(message)
                case AbortRequests():
                    self._abort(message.request_ids)
                case _:
                    if isinstance(message, Vocabulary):
                        self._of_all[""] = message
                    elif isinstance(message, UnpinPrefix):
                        self._of_all.pop(message.name, None)
                    self._send_to(self.replicas, message)

    def take_in(self, replica: Replica[C], outputs: StepOutputs) -> StepOutputs:
        """What a replica has told, as far as it concerns callers."""
        with self._lock:
            replica.stats = outputs.stats
            self._router.observe(replica.number, outputs.stats, outputs.kv_events)
            news = self._deliveries.take_in(replica.number, outputs.deltas)
            self._follow(news)
            self._try_suspect()
            if self.waiting and self._court is None:
                self._move_waiting()
            return msgspec.structs.replace(outputs, deltas=news.deltas, stats=self._stats(), kv_events=None)

    def lost(self, replica: Replica[C], error: CoreDiedError, another_comes: bool = False) -> StepOutputs:
        """The others go on with what it had, or one that comes. Raises `error` where there are none, or none can."""
        with self._lock:
            if self._in_rounds or (len(self.replicas) == 1 and not another_comes):
                raise error
            follows = ", and another one is started" if another_comes else ""
            logger.error(
                "replica %d was lost, %d are left%s\n%s", replica.place, len(self.replicas) - 1, follows, error
            )
            self._hand_over(replica, error)
            if not another_comes:
                self._move(self._suspects.take(self._deliveries.left))
            return StepOutputs(deltas=[], stats=self._stats())

    def start_failed(self) -> None:
        """One that was to come has died before it served."""
        with self._lock:
            self._gone = stats_of_all([CoreStats(replicas=0, core_deaths=1)], self._gone)
            self._has_lost = True

    def nobody_comes(self) -> None:
        """No replica follows one that was lost: where there is no court, suspects are computed beside the others."""
        with self._lock:
            if self._court is None and not self.resting:
                self._move(self._suspects.take(self._deliveries.left))

    def end_overdue(self) -> None:
        """Those that have waited too long for a replica; where all rest on purpose, only their deadlines count."""
        if self.waiting and not self.resting:
            with self._lock:
                for name in self.waiting.take_overdue():
                    self._fail(self._deliveries.left(name), GIVEN_UP, QueueFullError.kind, self.waiting.retry_after_s)

    def tell(self) -> None:
        """Whoever receives learns how many there are now."""
        with self._lock:
            self.told.append(StepOutputs(deltas=[], stats=self._stats()))

    def let_go(self) -> None:
        """Of those that are leaving, but not of the last one; the others go on with what they had."""
        with self._lock:
            for replica in [each for each in self.replicas if each.leaving]:
                if len(self.replicas) > 1 or self.resting:
                    self._hand_over(replica)
                    self.nobody_comes()  # as far as is known, where it was the court
                else:
                    replica.leaving = False
                    self._drain(replica, False)

    def _drain(self, replica: Replica[C], draining: bool) -> None:
        replica.draining = draining
        self._router.drain(replica.number, draining)

    def _stats(self) -> CoreStats:
        if len(self.replicas) == 1 and not self._has_lost:  # at every step
            return self.replicas[0].stats
        stats = stats_of_all([replica.stats for replica in self.replicas], self._gone)
        if self.replicas:
            return stats
        return msgspec.structs.replace(stats, waiting=self.waiting.num_sequences, asleep=self.resting)

    # -- requests ----------------------------------------------------------------------------------------------------

    def _add(self, message: AddRequest) -> None:
        if (why := self._convicts.why(message, time.monotonic())) is not None:
            self._fail(message.request_ids, why, "fault")
            return
        if not self.replicas:
            self._wait(message)
            return
        try:
            place = self._send_to_best(message, message)
        except CoreDiedError:  # the receiver is to find it
            if not self.waiting.most or all(each.draining for each in self.replicas):
                raise
            self._wait(message)
            return
        self._deliveries.add(message, place.replica)
        self._pin_elsewhere(message, place)

    def _wait(self, message: AddRequest) -> None:
        """For a replica that comes. Raises `QueueFullError`."""
        self.waiting.enter(message)
        if not self.replicas:
            self.told.append(StepOutputs(deltas=[], stats=self._stats()))

    def _pin_elsewhere(self, message: AddRequest, place: Place) -> None:
        """A prefix is kept wherever a request may go; the one at `place` tells the caller."""
        if message.pin is not None:
            self._of_all[message.pin] = message
            self._send_to([each for each in self.replicas if each.number != place.replica], message)
        if self._in_rounds:  # behind the request
            self._wakes += 1
            self._send_to(self.replicas, Wake(number=self._wakes))

    def _send_to_best(self, message: AddRequest, left: AddRequest, only: Replica[C] | None = None) -> Place:
        """To the best of those that take it, rather than to one that is stalled; of `message` what is `left`. Raises
        `QueueFullError` where none takes it, `CoreDiedError` where there is none."""
        refused: EngineError = CoreDiedError("no replica serves: all are being removed")
        clients = {replica.number: replica.client for replica in self.replicas}
        places = [each for each in self._router.places(message) if only is None or each.replica == only.number]
        for place in sorted(places, key=lambda place: clients[place.replica].stalled() is not None):
            try:
                clients[place.replica].send(left)
            except QueueFullError as error:
                refused = error
            except CoreDiedError as error:  # the receiver is to find it
                refused = refused if isinstance(refused, QueueFullError) else error
            else:
                wanted = len(self._deliveries.left(message.request_id))  # of a search less than is computed again
                self._router.sent(message, place, wanted or None)
                return place
        raise refused

    def _abort(self, names: list[str]) -> None:
        of_each: dict[int | None, list[str]] = {}
        for name in names:
            replica_number = self._deliveries.replica_of(name)
            ended = self._deliveries.end(name)
            if ended is not None and not self._deliveries.left(ended.name):
                self._suspects.forget(ended.name)
            if ended is not None and replica_number is not None:
                of_each.setdefault(replica_number, []).append(name)
                self._router.sequence_ended(ended.name, ended.generated)
        for replica in self.replicas:
            if replica.number in of_each:
                self._send_to([replica], AbortRequests(request_ids=of_each[replica.number]))
        self._try_suspect()

    def _send_to(self, replicas: Sequence[Replica[C]], message: ToCore) -> None:
        """One that is dead is the receiver's to find."""
        for replica in replicas:
            try:
                replica.client.send(message)
            except (CoreDiedError, QueueFullError) as error:
                logger.warning("replica %d was not told: %s", replica.place, str(error).rpartition("\n")[2])

    def _follow(self, news: News) -> None:
        for name in news.began:
            self._router.began(name)
        for ended in news.ended:
            self._router.sequence_ended(ended.name, ended.generated)
            if not self._deliveries.left(ended.name):
                self._suspects.forget(ended.name)

    # -- taken over --------------------------------------------------------------------------------------------------

    def _hand_over(self, replica: Replica[C], death: CoreDiedError | None = None) -> None:
        """Nobody listens to it any more."""
        self.replicas = tuple(each for each in self.replicas if each is not replica)
        died = CoreStats(replicas=0, core_deaths=int(death is not None))
        self._gone = stats_of_all([counters_of(replica.stats), died], self._gone)
        self._has_lost = True
        if replica is self._court:
            self._court = None
            self._suspects.adjourn()
        lost, killers = self._router.remove(replica.number), list[str]()
        go_on, log = lost, replica.client.begun()
        there = {name for name in lost if log.has_any(self._deliveries.message(name).request_ids)}
        self._deliveries.waits_anew(there)
        if death is not None:
            deliveries = self._deliveries
            go_on, killers = self._suspects.of_death(lost, there.__contains__, deliveries.got_on, deliveries.well_on)
        for name in lost:
            self._deliveries.move(name, None)
        for name in killers:
            assert death is not None
            self._convicts.add(self._deliveries.message(name), _killed(death), time.monotonic())
            self._fail(self._deliveries.left(name), _killed(death), "fault")
        if not self.replicas or self.resting:
            self.waiting.keep(go_on)
            return
        if all(each.draining for each in self.replicas):  # who else?
            for each in self.replicas:
                self._drain(each, False)
        self._move(go_on)
        self._move_waiting()  # for whom there was no room, though there is some now

    def _try_suspect(self) -> None:
        """The next one, when the trial before is over; behind the last one the court is a replica like any other."""
        court, left = self._court, self._deliveries.left
        if court is None or self._suspects.is_trying(left, self._deliveries.well_on):
            return
        name = self._suspects.next(left)
        self._router.drain(court.number, name is None and court.draining)
        if name is not None:
            self._deliveries.waits_anew([name])
            self._move([name], court)
            self._router.drain(court.number, True)
        else:
            self._court = None
            self._move_waiting()

    def _move_waiting(self) -> None:
        self._move(self.waiting.take())

    def _move(self, names: Sequence[str], only: Replica[C] | None = None) -> None:
        """Requests that no replica has. Callers are told of what none takes. `only`: where they are to go."""
        for name in names:
            left = self._deliveries.left(name)
            error = self._moved(name, only) if left else None
            # One that died in this moment, or so much is under way that it has no room now.
            if isinstance(error, (CoreDiedError, QueueFullError)) and self.waiting.most:
                self._deliveries.move(name, None)
                if only is None:
                    self.waiting.keep([name])
                else:
                    self._suspects.again(name)
            elif error is not None:
                self._fail(left, str(error), error.kind if isinstance(error, QueueFullError) else "fault")

    def _fail(self, names: Sequence[str], error: str, kind: str, retry_after_s: float = 1.0) -> None:
        """Sequences that no replica has."""
        for name in names:
            ended = self._deliveries.end(name)
            if ended is not None and not self._deliveries.left(ended.name):
                self._suspects.forget(ended.name)
        deltas: list[Delta] = [
            SequenceDelta(
                request_id=each, finish_reason="error", error=error, error_kind=kind, retry_after_s=retry_after_s
            )
            for each in names
        ]
        if deltas:
            self.told.append(StepOutputs(deltas=deltas, stats=self._stats()))

    def _moved(self, name: str, only: Replica[C] | None) -> EngineError | None:
        """Why no replica goes on with a request; None: one does."""
        message, left = self._deliveries.message(name), self._deliveries.resumed(name)
        if message.pin is not None:  # the others have it or compute it, and one of them is to tell
            self._send_to(self.replicas, AbortRequests(request_ids=left.request_ids))
            self._send_to(self.replicas, UnpinPrefix(name=message.pin))
        try:
            place = self._send_to_best(message, left, only)
        except EngineError as error:
            return error
        if only is None:
            self._pin_elsewhere(message, place)
        self._deliveries.move(name, place.replica)
        if left.resumed:
            deltas: list[Delta] = [SequenceDelta(request_id=each, moved=True) for each in left.request_ids]
            self.told.append(StepOutputs(deltas=deltas, stats=self._stats()))
        return None


def _killed(death: CoreDiedError) -> str:
    """Of a request, when it was alone."""
    cause = str(death).rpartition("\n")[2]
    return f"the engine core died each time that it computed this request, in the end with no other suspect: {cause}"
