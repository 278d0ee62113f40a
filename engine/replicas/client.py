"""Several cores behind the interface of one: data parallelism. Who holds a `CoreClient` need not know how many.

Each replica is a core process with the whole model and a KV cache of its own. One that dies is followed by another one;
what it had goes on at the others, or waits for that. After too many deaths the last one's is the engine's.
"""

from __future__ import annotations

import logging
import os
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, as_completed
from contextlib import contextmanager, suppress

from engine.config import EngineConfig
from engine.core.client import ProcessClient
from engine.core.rounds import in_rounds
from engine.core.waiting import wait, wait_async
from engine.core.wire import CoreReady, CoreStats, StepOutputs, ToCore
from engine.errors import ConfigError, CoreDiedError
from engine.limits import MAX_REPLICAS
from engine.parallel.group_memory import SLOT_BYTES, allocate
from engine.replicas.fleet import Fleet
from engine.replicas.following import Following
from engine.replicas.layout import replica_config, replica_cpus
from engine.replicas.replica import Replica
from engine.replicas.restarts import WINDOW_S, Restarts
from engine.replicas.router import Router
from engine.replicas.sleeping import Sleeping
from engine.replicas.stop_watch import StopWatch
from engine.replicas.together import ready_of_all
from engine.setting_checks import check_ports, check_transfer_port

logger = logging.getLogger(__name__)

MakeClient = Callable[[EngineConfig, Sequence[int] | None, int | None], ProcessClient]
"""(configuration of a replica, the logical CPUs that it may run on, the memory that it shares with the others)"""
LOOK_S = 0.05
"""how often who takes a replica away looks whether it is free"""


def _process(config: EngineConfig, cpus: Sequence[int] | None, group_fd: int | None) -> ProcessClient:
    return ProcessClient(config, cpus=cpus, group_fd=group_fd)


class ReplicatedClient(Following, Sleeping):
    """See `engine.core.client.CoreClient`. Replicas may be added and removed from any thread while it serves."""

    def __init__(self, config: EngineConfig, make_client: MakeClient = _process, router: Router | None = None) -> None:
        super().__init__()
        self._config = config
        self._make_client = make_client
        self._in_rounds = in_rounds(config)
        scheduler = config.scheduler
        followed = config.core_restarts > 0 and not self._in_rounds
        most_waiting = scheduler.max_waiting + scheduler.max_num_seqs if followed else 0
        router = router or Router(config.cache.block_size, config.parallel.data > 1)
        is_fair = scheduler.policy == "fair"
        self._fleet: Fleet[ProcessClient] = Fleet(router, self._in_rounds, most_waiting, scheduler.speculation, is_fair)
        self._restarts = Restarts(0 if self._in_rounds else config.core_restarts)
        self._leaving = threading.Event()
        self._watch = StopWatch(self._in_rounds)
        self._group_fd: int | None = None
        self._lock = threading.Lock()
        self._one_change = threading.RLock()
        """held by whoever was asked for more replicas, fewer, sleep or others, until that is done"""
        self._changing = threading.RLock()
        """held while replicas come and go, not while one drains: others die meanwhile, and are followed"""
        self._starting: dict[int, ProcessClient] = {}
        """by their places"""
        self._next_number = self._turn = self._receivers = 0
        self._wake = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self._died: str | None = None
        self._abandoned = self._closed = False

    def start(self) -> CoreReady:
        size = self._config.parallel.data
        try:
            if self._in_rounds:
                self._group_fd = allocate(size, SLOT_BYTES)
            replicas = self._start_many(size)
            self._wanted = size
        except BaseException:
            self.close()
            raise
        finally:
            if self._group_fd is not None:
                os.close(self._group_fd)
                self._group_fd = None
        self._serve(*replicas)
        return ready_of_all([replica.ready for replica in replicas])

    def _start_many(self, size: int) -> list[Replica[ProcessClient]]:
        starts: list[Future[Replica[ProcessClient]]] = []
        try:
            with ThreadPoolExecutor(max_workers=size) as pool:
                starts += [pool.submit(self._start_one) for _ in range(size)]
                try:
                    return sorted((each.result() for each in as_completed(starts)), key=lambda each: each.number)
                except BaseException:
                    for client in list(self._starting.values()):
                        client.abandon()  # nobody waits for the others
                    raise
        except BaseException:
            for each in starts:
                if each.exception() is None:
                    del self._starting[each.result().place]
                    each.result().client.close()
            raise

    def send(self, message: ToCore) -> None:
        self._check_open()
        self._fleet.send(message)
        if self._in_rounds or self._fleet.told:
            os.eventfd_write(self._wake, 1)  # whoever receives looks whether all go on, and at what is told

    def recv(self) -> StepOutputs:
        with self._receiving():
            while (outputs := self._poll()) is None:
                wait(self._clients, self._wake, self._look_s)
            return outputs

    async def recv_async(self) -> StepOutputs:
        with self._receiving():
            while (outputs := self._poll()) is None:
                await wait_async(self._clients, self._wake, self._look_s)
            return outputs

    @property
    def _look_s(self) -> float | None:
        """Until something is to be looked at of which no descriptor tells; None: there is nothing."""
        return 1.0 if self._fleet.waiting and self._watch.look_s is None else self._watch.look_s

    def wait_compiled(self) -> None:
        kept: list[StepOutputs] = []
        with self._receiving():
            while any(client.compiling for client in self._clients):
                if (outputs := self._poll()) is not None:
                    kept.append(outputs)
                else:
                    wait(self._clients, self._wake)
        self._fleet.told.extend(kept)

    def stalled(self) -> str | None:
        """Where one makes progress, new requests go there."""
        reasons = [client.stalled() for client in self._clients]
        return reasons[0] if reasons and all(reason is not None for reason in reasons) else None

    @property
    def is_restarting(self) -> bool:
        """No core serves, and one is being started in the place of one that died."""
        return bool(not self._fleet.replicas and self._following and not self._asleep)

    def abandon(self) -> None:
        self._abandoned = True
        for client in [*self._starting.values(), *self._clients]:
            client.abandon()
        if not self._closed:
            os.eventfd_write(self._wake, 1)  # whoever waits while nobody serves

    def close(self) -> None:
        """Not while somebody receives. Who adds or removes a replica meanwhile raises first."""
        if self._closed:
            return
        self._closed = True
        self._leaving.set()
        for client in list(self._starting.values()):
            client.abandon()  # whoever starts it closes it, too
        with self._changing:
            clients = [*self._starting.values(), *self._clients]
            with ThreadPoolExecutor(max_workers=max(len(clients), 1)) as pool:
                list(pool.map(lambda client: client.close(), clients))
        for thread in [*self._following, *([self._later] if self._later is not None else [])]:
            thread.join()
        os.close(self._wake)

    # -- replicas come and go ----------------------------------------------------------------------------------------

    @property
    def replicas(self) -> list[int]:
        """The numbers of those that serve. A number is not used again."""
        return [replica.number for replica in self._fleet.replicas if not replica.leaving]

    def stats_of_each(self) -> dict[int, CoreStats]:
        """What each of those that serve has told last, by their places, which are the numbers in the log and the ranks
        of KV events."""
        return {replica.place: replica.stats for replica in self._fleet.replicas}

    def add_replica(self) -> int:
        """Start another one and return its number. Raises what `start` raises, and the others go on."""
        self._refuse_in_rounds()
        with self._one_change, self._changing:
            self._check_open()
            if len(self.replicas) >= MAX_REPLICAS:
                raise ConfigError(f"there are {len(self.replicas)} replicas, and at most {MAX_REPLICAS} are allowed")
            self._check_ports(len(self.replicas) + 1)
            replica = self._start_one()
            self._serve(replica)
            self._wanted = len(self.replicas)
            self._fleet.tell()
            os.eventfd_write(self._wake, 1)  # whoever receives listens to it, too
        return replica.number

    def remove_replica(self, number: int, drain_timeout_s: float | None = None) -> None:
        """It gets no more requests; when those that it has are over, or after that time, it is stopped, and what is
        left of them goes to the others. Raises `ConfigError` for the last one, and for a number that is none."""
        self._refuse_in_rounds()
        with self._one_change:
            with self._changing:
                replica = self._drained(number)
                self._wanted -= 1
            try:
                self._until_idle(replica, drain_timeout_s)
                with self._changing:
                    self._take_away([replica])
                    self._check_open()
                    if replica in self._fleet.replicas:
                        raise ConfigError(f"replica {number} is the only one that is left")
            except ConfigError:
                self._wanted += 1
                if self._config.core_restarts:  # whoever was to follow another one may have found nobody missing
                    self._follow_in(0.0)
                raise
            self._fleet.tell()
            os.eventfd_write(self._wake, 1)
            replica.client.close()

    def _drained(self, number: int) -> Replica[ProcessClient]:
        """It gets no more requests from now on."""
        self._check_open()
        replica = next((each for each in self._fleet.replicas if each.number == number), None)
        if replica is None:
            raise ConfigError(f"there is no replica {number}: there are {self.replicas}")
        if len(self.replicas) == 1:
            raise ConfigError(f"replica {number} is the only one: shut the engine down instead")
        self._fleet.drain(replica)
        return replica

    def _until_idle(self, replica: Replica[ProcessClient], timeout_s: float | None) -> None:
        until = None if timeout_s is None else time.monotonic() + timeout_s
        while not self._fleet.is_idle(replica.number) and (until is None or time.monotonic() < until):
            time.sleep(LOOK_S)
            self._check_open()
            if not replica.draining:
                raise ConfigError(f"replica {replica.number} is the only one that is left")

    def _take_away(self, replicas: Sequence[Replica[ProcessClient]]) -> None:
        """Until nobody listens to them any more, or they turned out to be the last ones."""
        for replica in replicas:
            replica.leaving = True
        while any(each in self._fleet.replicas and each.leaving for each in replicas) and not self._closed:
            os.eventfd_write(self._wake, 1)  # the receiver lets go of them
            with self._lock:
                if not self._receivers:
                    self._fleet.let_go()
            time.sleep(LOOK_S)

    def scale(self, replicas: int, drain_timeout_s: float | None = None) -> None:
        """Serve with as many from now on; of those that are too many the youngest go. Raises as the two above."""
        self._refuse_in_rounds()
        if not 1 <= replicas <= MAX_REPLICAS:
            raise ConfigError(f"replicas must be in [1, {MAX_REPLICAS}], got {replicas}")
        self._check_ports(replicas)
        with self._one_change:  # as a whole: two that differ would undo each other's steps
            if self._asleep:
                raise ConfigError("the engine sleeps: wake it up first")
            while len(self.replicas) < replicas:
                self.add_replica()
            while len(self.replicas) > replicas:
                self.remove_replica(self.replicas[-1], drain_timeout_s)
            self._wanted = replicas

    def _check_ports(self, replicas: int) -> None:
        if self._config.kv_events is not None:
            check_ports(self._config.kv_events, replicas)
        if self._config.kv_transfer is not None:
            check_transfer_port(self._config.kv_transfer, replicas)

    def _refuse_in_rounds(self) -> None:
        if self._in_rounds:
            raise ConfigError(
                "enable_expert_parallel: each replica has experts that no other one has, so none comes or goes while "
                "they serve"
            )

    @property
    def _clients(self) -> list[ProcessClient]:
        return [replica.client for replica in self._fleet.replicas]

    def _start_one(self, in_time: bool = False) -> Replica[ProcessClient]:
        with self._lock:
            number, taken = self._next_number, {*self._starting, *(each.place for each in self._fleet.replicas)}
            self._next_number += 1
            place = next(place for place in range(MAX_REPLICAS + 1) if place not in taken)
            config, cpus = replica_config(self._config, place), replica_cpus(self._config, place)
            client = self._make_client(config, cpus, self._group_fd)
            self._starting[place] = client
        if self._abandoned or self._closed:
            client.abandon()
        try:
            with self._starts(client, in_time):
                ready = client.start()
        except BaseException:
            del self._starting[place]
            client.close()
            raise
        return Replica(
            number, place, client, ready, CoreStats(compiling=ready.compiling, kv_blocks_total=ready.num_blocks)
        )

    def _serve(self, *replicas: Replica[ProcessClient]) -> None:
        self._fleet.add(*replicas)
        for replica in replicas:
            del self._starting[replica.place]

    @contextmanager
    def _receiving(self) -> Iterator[None]:
        with self._lock:
            self._receivers += 1
        try:
            yield
        finally:
            with self._lock:
                self._receivers -= 1

    def _poll(self) -> StepOutputs | None:
        """What has come of any of them, in turn."""
        self._check_open()
        with suppress(BlockingIOError):
            os.eventfd_read(self._wake)
        self._fleet.let_go()
        self._fleet.end_overdue()
        if self._fleet.told:
            return self._fleet.told.popleft()
        replicas, turn = self._fleet.replicas, self._turn
        for index in range(len(replicas)):
            replica = replicas[(turn + index) % len(replicas)]
            try:
                outputs = replica.client.poll()
            except CoreDiedError as error:
                return self._lost(replica, error)
            if outputs is not None:
                self._turn = turn + index + 1
                return self._fleet.take_in(replica, outputs)
        if (stopped := self._watch.stopped([replica.client for replica in replicas])) is not None:
            replica = replicas[stopped]
            replica.client.abandon()  # it could not leave by itself
            return self._lost(replica, CoreDiedError(f"replica {replica.place} was stopped by a signal"))
        return None

    def _lost(self, replica: Replica[ProcessClient], error: CoreDiedError) -> StepOutputs:
        wait_s = self._restarts.died(time.monotonic(), replica.stats.steps > 0)
        try:
            outputs = self._fleet.lost(replica, error, wait_s is not None or bool(self._following))
        except CoreDiedError:
            self._died = str(error)
            if not self._in_rounds and self._config.core_restarts:
                most = f"{self._config.core_restarts} deaths in {WINDOW_S:g} s are followed (--core-restarts)"
                logger.error("no core is started any more: %s, and this was one more", most)
            if self._in_rounds:  # the others wait for it
                for client in self._clients:
                    client.abandon()
            raise
        if wait_s is not None:
            self._follow_in(wait_s)
        elif self._config.core_restarts:
            self._follow_later()
        replica.client.close()
        return outputs

    def _check_open(self) -> None:
        if self._died is not None:
            raise CoreDiedError(self._died)
        gone = self._closed or (self._abandoned and not self._fleet.replicas)
        if gone or not (self._fleet.replicas or self._following or self._asleep):
            raise CoreDiedError("the cores are not running: not started, or closed")
