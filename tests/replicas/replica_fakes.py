"""Cores without a device: in a process of their own, or as a few lines that answer at once."""

from __future__ import annotations

import os
import time
from collections import deque
from random import Random
from typing import NoReturn

from core_fakes import FakeExecutor

from engine.config import EngineConfig
from engine.core.begun import Begun
from engine.core.wire import (
    AbortRequests,
    AddRequest,
    CoreStats,
    Delta,
    SequenceDelta,
    StepOutputs,
    ToCore,
    TokenDeltas,
)
from engine.errors import CoreDiedError, QueueFullError
from engine.step import StepPlan, StepResult


class Counting(FakeExecutor):
    """Each token is its position, so that what is computed again comes again."""

    step_s = 0.002

    def compute(self, plan: StepPlan) -> StepResult:
        tokens = [row.computed + row.query_len for row in plan.rows.each() if row.samples]
        return StepResult(step_id=super().compute(plan).step_id, token_ids=[10 + token % 80 for token in tokens])


class SlowlyCounting(Counting):
    step_s = 0.05


def never_made(config: EngineConfig) -> NoReturn:
    """An executor that takes for ever."""
    while True:
        time.sleep(60)


def _starts() -> int:
    """So many there have been with this one: `STARTS` is a file with a line for each."""
    with open(os.environ["STARTS"], "a+") as file:
        file.write("started\n")
        file.seek(0)
        return len(file.readlines())


class HangsInItsSecondStart(Counting):
    def __init__(self, config: EngineConfig) -> None:
        super().__init__(config)
        hangs = _starts() == 2
        while hangs:
            time.sleep(60)


class NeverEndsAStepAtFirst(Counting):
    """In two starts."""

    def __init__(self, config: EngineConfig) -> None:
        super().__init__(config)
        self._hangs = _starts() <= 2

    def compute(self, plan: StepPlan) -> StepResult:
        while self._hangs:
            time.sleep(60)
        return super().compute(plan)


def tokens_of(name: str, count: int) -> list[int]:
    """What a `LittleCore` generates for a sequence."""
    random = Random(name)
    return [random.randrange(1000) for _ in range(count)]


class LittleCore:
    """Requests in, outputs out when it is asked to `turn`: a token for each sequence, and now and then several."""

    def __init__(self, random: Random, capacity: int = 10**6) -> None:
        self.messages: list[ToCore] = []
        self.running: dict[str, deque[int]] = {}
        self.dead = self.is_stalled = False
        self._random = random
        self._capacity = capacity

    def send(self, message: ToCore) -> None:
        if self.dead:
            raise CoreDiedError("dead")
        if isinstance(message, AddRequest):
            if len(self.running) >= self._capacity:
                raise QueueFullError("full")
            for index, name in enumerate(message.request_ids):
                assert name not in self.running
                had = message.resumed[index].token_ids if message.resumed else []
                wanted = tokens_of(name, message.max_tokens)
                assert had == wanted[: len(had)]
                self.running[name] = deque(wanted[len(had) :])
        elif isinstance(message, AbortRequests):
            for name in message.request_ids:
                self.running.pop(name, None)
        self.messages.append(message)

    def begun(self) -> Begun:
        return Begun(None)

    def stalled(self) -> str | None:
        return "it hangs" if self.is_stalled else None

    def turn(self) -> StepOutputs:
        """A step of some of its sequences."""
        random, deltas = self._random, list[Delta]()
        singles: list[tuple[str, int]] = []
        for name, left in list(self.running.items()):
            count = min(random.choice((0, 1, 1, 1, 3)), len(left))
            tokens = [left.popleft() for _ in range(count)]
            if not left:
                del self.running[name]
                deltas.append(SequenceDelta(request_id=name, token_ids=tokens, finish_reason="length"))
            elif count == 1:
                singles.append((name, tokens[0]))
            elif count:
                deltas.append(SequenceDelta(request_id=name, token_ids=tokens))
        if singles:
            names, values = zip(*singles, strict=True)
            deltas.append(TokenDeltas(request_ids=list(names), token_ids=list(values)))
        stats = CoreStats(running=len(self.running), kv_blocks_total=1000, kv_blocks_used=len(self.running))
        return StepOutputs(deltas=deltas, stats=stats)
