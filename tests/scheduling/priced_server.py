"""A scheduler that knows what its steps cost and how long answers are, on a clock of its own."""

from __future__ import annotations

from collections import deque

import numpy as np
from scheduler_loop import Loop

from engine.core.wire import AddRequest
from engine.request import NOBODY, Tenant
from engine.scheduling.expected import Expected
from engine.scheduling.margin import Margin
from engine.step import RowParams, Rows

STEP_S, ROW_S, PROMPT_S = 0.01, 0.005, 0.001


def request_of(
    name: str,
    max_tokens: int,
    deadline_s: float | None = None,
    prompt: int = 4,
    tenant: Tenant = NOBODY,
    priority: int = 0,
) -> AddRequest:
    return AddRequest(
        request_id=name,
        prompt_token_ids=[1] * prompt,
        params=RowParams(seed=0),
        max_tokens=max_tokens,
        tenant=tenant,
        priority=priority,
        deadline_s=deadline_s,
    )


class Server:
    """A scheduler that has seen answers as long as was allowed, and steps that cost what those of above do."""

    def __init__(self, rows: int = 8, policy: str = "fcfs", num_blocks: int = 4096) -> None:
        self.loop = Loop(
            rows=rows,
            num_blocks=num_blocks,
            budget=64,
            max_model_len=2048,
            policy=policy,
            caching=False,  # type: ignore[arg-type]
        )
        self.scheduler, self.now = self.loop.scheduler, 1000.0
        self.expected: Expected = self.scheduler._expected
        self.expected.clock = lambda: self.now
        self.expected._margin = Margin(self.now)
        self.expected._came = deque([self.now], maxlen=self.expected._came.maxlen)
        costs = self.scheduler._costs
        for turn in range(400):
            num = 1 + turn % 8
            costs.observe(Rows(np.ones((5, num), dtype=np.int32)), 0, STEP_S + ROW_S * num)
        costs.prompt_token_s, self._sums = PROMPT_S, costs._sums
        for index in range(400):
            most = 10 + 37 * (index % 11)
            self.expected.answers.ended("", most, most, by_itself=True)

    def add(self, request: AddRequest) -> None:
        self.scheduler.add(request)

    def turns(self, count: int) -> None:
        for _ in range(count):
            self.loop.turn()
        costs = self.scheduler._costs
        costs._decodes_s, costs.prompt_token_s, costs._sums = STEP_S, PROMPT_S, self._sums
