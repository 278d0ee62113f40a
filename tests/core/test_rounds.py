"""Replicas that take steps together: whatever comes in which order, nobody takes one alone, waits for ever or turns
without end."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from engine.core.rounds import Rounds
from engine.step import RoundEnd, RoundStart


@dataclass
class Request:
    number: int
    steps: int
    """left to plan"""
    prepared: bool
    """False: it waits for its grammar, and nothing can be planned"""
    unanswered: int = 0


@dataclass
class Replica:
    rounds: Rounds
    depth: int
    inbox: deque[tuple[str, int | Request]] = field(default_factory=deque)
    requests: dict[int, Request] = field(default_factory=dict)
    in_flight: deque[list[Request]] = field(default_factory=deque)
    """of each round what of own requests it computes"""
    begun: int = 0

    @property
    def is_busy(self) -> bool:
        return bool(self.requests) or any(self.in_flight)

    def deliver(self) -> None:
        kind, what = self.inbox.popleft()
        if isinstance(what, Request):
            self.requests[what.number] = what
        elif kind == "wake":
            self.rounds.wake(what)
        elif kind == "abort":
            self.requests.pop(what, None)

    def plan(self) -> tuple[RoundStart, int] | None:
        """What it says as the next round begins, and how many tokens it brings."""
        busy = self.is_busy
        if len(self.in_flight) == self.depth or not self.rounds.wanted(busy):
            return None
        mine = [each for each in self.requests.values() if each.prepared and each.steps]
        for each in mine:
            each.steps -= 1
            each.unanswered += 1
        self.in_flight.append(mine)
        self.begun += 1
        return self.rounds.begin(busy), len(mine)

    def collect(self, quiet: int | None) -> None:
        for each in self.in_flight.popleft():
            each.unanswered -= 1
            if not each.steps and not each.unanswered:
                self.requests.pop(each.number, None)
        self.rounds.ended(RoundEnd(quiet))


class Machine(RuleBasedStateMachine):
    @initialize(size=st.integers(2, 4), depth=st.integers(1, 3))
    def start(self, size: int, depth: int) -> None:
        self.replicas = [Replica(Rounds(depth), depth) for _ in range(size)]
        self.said: list[list[tuple[RoundStart, int] | None]] = []
        """in each round, by each replica that has begun it"""
        self.sent = 0

    def _each(self, which: int) -> Replica:
        return self.replicas[which % len(self.replicas)]

    @rule(which=st.integers(0, 3), steps=st.integers(1, 4), prepared=st.booleans())
    def send(self, which: int, steps: int, prepared: bool) -> None:
        self.sent += 1
        self._each(which).inbox.append(("request", Request(self.sent, steps, prepared)))
        for replica in self.replicas:
            replica.inbox.append(("wake", self.sent))

    @rule(which=st.integers(0, 3), number=st.integers(1, 20))
    def abort(self, which: int, number: int) -> None:
        self._each(which).inbox.append(("abort", number))

    @rule(which=st.integers(0, 3), count=st.integers(1, 4))
    def deliver(self, which: int, count: int) -> None:
        replica = self._each(which)
        for _ in range(min(count, len(replica.inbox))):
            replica.deliver()

    @rule(which=st.integers(0, 3))
    def prepare(self, which: int) -> None:
        for request in self._each(which).requests.values():
            request.prepared = True

    @rule(which=st.integers(0, 3))
    def plan(self, which: int) -> None:
        self._plan(which)

    @rule(which=st.integers(0, 3))
    def collect(self, which: int) -> None:
        self._collect(which)

    @rule(turns=st.integers(5, 12))
    def go_on(self, turns: int) -> None:
        """All that was sent has come; requests that wait for grammars go on waiting."""
        for which, replica in enumerate(self.replicas):
            self.deliver(which, len(replica.inbox))
        for turn in range(turns * len(self.replicas)):
            self._plan(turn)
            self._collect(turn)

    def _plan(self, which: int) -> bool:
        index, replica = which % len(self.replicas), self._each(which)
        number = replica.begun
        said = replica.plan()
        if said is None:
            return False
        if number == len(self.said):
            self.said.append([None] * len(self.replicas))
        self.said[number][index] = said
        return True

    def _collect(self, which: int) -> bool:
        """Where all have begun that round."""
        replica = self._each(which)
        number = replica.begun - len(replica.in_flight)
        if not replica.in_flight or None in self.said[number]:
            return False
        said = [each for each in self.said[number] if each is not None]
        wakes = {start.wake for start, _ in said}
        quiet = len(wakes) == 1 and not any(start.busy or tokens for start, tokens in said)
        replica.collect(wakes.pop() if quiet else None)
        return True

    @invariant()
    def nobody_is_further_ahead_than_it_may(self) -> None:
        if hasattr(self, "replicas"):
            rounds = [replica.begun for replica in self.replicas]
            assert max(rounds) - min(rounds) <= self.replicas[0].depth

    def teardown(self) -> None:
        """When all that was sent has come, all of it is computed, all are at the same round, and none goes on."""
        if not hasattr(self, "replicas"):
            return
        for which, replica in enumerate(self.replicas):
            self.deliver(which, len(replica.inbox) + 1)
            self.prepare(which)
        turns = 0
        while True in [self._plan(which) | self._collect(which) for which in range(len(self.replicas))]:
            turns += 1
            assert turns < 200, "rounds without end"
        assert not any(replica.is_busy or replica.in_flight for replica in self.replicas)
        assert len({replica.begun for replica in self.replicas}) == 1


Machine.TestCase.settings = settings(max_examples=150, stateful_step_count=40, deadline=None)
TestMachine = Machine.TestCase


@pytest.mark.exhaustive
def test_many_more_lives() -> None:
    from hypothesis.stateful import run_state_machine_as_test

    run_state_machine_as_test(Machine, settings=settings(max_examples=10_000, stateful_step_count=80, deadline=None))
