"""A fleet of little cores, and what its callers have seen: requests, aborts, replicas that come, go and die."""

from __future__ import annotations

from random import Random

from replica_fakes import LittleCore

from engine.core.wire import (
    AbortRequests,
    AddRequest,
    CoreReady,
    Follower,
    SequenceDelta,
    StepOutputs,
    each_delta,
)
from engine.errors import CoreDiedError, QueueFullError
from engine.replicas.fleet import Fleet
from engine.replicas.replica import Replica
from engine.replicas.router import Router
from engine.step import RowParams

READY = CoreReady(
    num_blocks=1000,
    block_size=16,
    max_model_len=4096,
    attention_backend="fake",
    ledger="",
    distinct_pieces=0,
    pieces_compiled=0,
    startup_seconds=0.0,
)


def added(name: str, prompt: list[int], max_tokens: int, n: int = 1, pin: str | None = None) -> AddRequest:
    followers = [Follower(request_id=f"{name}-{index}", seed=index) for index in range(1, n)]
    return AddRequest(
        request_id=name,
        prompt_token_ids=prompt,
        params=RowParams(seed=0),
        max_tokens=max_tokens,
        followers=followers,
        pin=pin,
    )


class Life:
    """A fleet, and what its callers have seen."""

    def __init__(self, seed: int, capacity: int = 10**6, followed: bool = False) -> None:
        """`followed`: where all have died, another one comes."""
        self.random = Random(seed)
        self.capacity, self.followed = capacity, followed
        self.fleet: Fleet[LittleCore] = Fleet(Router(16), most_waiting=10**6 if followed else 0)
        self.numbers = 0
        self.wanted: dict[str, int] = {}
        self.got: dict[str, list[int]] = {}
        self.ended: dict[str, SequenceDelta] = {}
        self.aborted: set[str] = set()
        for _ in range(2):
            self.come()

    def come(self) -> None:
        self.fleet.add(Replica(self.numbers, self.numbers, LittleCore(self.random, self.capacity), READY))
        self.numbers += 1

    def request(self, name: str, n: int) -> AddRequest:
        prompt = [self.random.randrange(3) for _ in range(self.random.randrange(1, 70))]
        message = added(name, prompt, self.random.randrange(1, 12), n)
        try:
            self.fleet.send(message)
        except QueueFullError:
            return message
        for each in message.request_ids:
            self.wanted[each], self.got[each] = message.max_tokens, []
        return message

    def abort(self) -> None:
        self.see_told()  # front ends drop what comes of a request that is gone
        running = [name for name in self.wanted if name not in self.ended and name not in self.aborted]
        if running:
            name = self.random.choice(running)
            self.aborted.add(name)
            self.fleet.send(AbortRequests(request_ids=[name]))

    def turn(self) -> None:
        self.fleet.let_go()
        for replica in self.fleet.replicas:
            self.see_told()  # as the client: before anything that a replica says
            if replica.client.dead:
                if len(self.fleet.replicas) > 1 or self.followed:
                    self.see(self.fleet.lost(replica, CoreDiedError("killed"), self.followed))
            elif replica in self.fleet.replicas:
                self.see(self.fleet.take_in(replica, replica.client.turn()))
        self.see_told()

    def see_told(self) -> None:
        while self.fleet.told:
            self.see(self.fleet.told.popleft())

    def see(self, outputs: StepOutputs) -> None:
        for delta in each_delta(outputs.deltas):
            assert delta.request_id not in self.aborted and delta.request_id not in self.ended
            self.got[delta.request_id] += delta.token_ids
            if delta.finish_reason is not None:
                self.ended[delta.request_id] = delta

    def lose(self, leave: bool) -> None:
        alive = [replica for replica in self.fleet.replicas if not replica.client.dead and not replica.leaving]
        if len(alive) > 1 or (alive and self.followed and not leave):
            replica = self.random.choice(alive)
            if leave:
                self.fleet.drain(replica)
                replica.leaving = True
            else:
                replica.client.dead = True

    def finish(self) -> None:
        self.fleet.nobody_comes()  # whoever was to follow has found that as many serve as were asked for
        for _ in range(400):
            if not self.fleet.replicas:
                self.come()
            if not self.wanted.keys() - self.ended.keys() - self.aborted:
                break
            self.turn()
        self.turn()

    def check_nothing_is_left(self) -> None:
        router, deliveries = self.fleet._router, self.fleet._deliveries
        assert not router._sent and not router.index._expected
        assert not deliveries._requests and not deliveries._sequences
        assert all(load.work == 0 and load.requests == 0 for load in router._loads.values())
