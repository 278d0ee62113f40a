"""How long a request will take that comes now: what waits before it, over how fast such work has been taken up, then
its own prompt and answer. Who cannot be served in time is told so at once, not when its time is over."""

from __future__ import annotations

import math
import time
from collections.abc import Callable

from engine.core.wire import AddRequest
from engine.errors import QueueFullError
from engine.request import Tenant
from engine.scheduling.fair_queue import FairQueue
from engine.scheduling.waiting_queue import WaitingQueue
from engine.step_costs import StepCosts

_WINDOW_S = 0.5
"""over which is seen how fast prompts are taken up, while some wait"""
_MEMORY = 0.8
"""weight of the past in running means"""
_ANSWER_MEMORY = 0.98


class Expected:
    def __init__(self, waiting: WaitingQueue, costs: StepCosts, clock: Callable[[], float] = time.monotonic) -> None:
        self._waiting, self._costs, self._clock = waiting, costs, clock
        self._rate = 0.0
        """tokens of prompts that were taken up in a second; 0: nobody had to wait yet"""
        self._since: float | None = None
        self._taken = 0
        self._answer, self._square = 0.0, 0.0
        """running means of answers' lengths, and of their squares"""

    def queued(self) -> None:
        """A request waits."""
        if self._since is None:
            self._since, self._taken = self._clock(), 0

    def started(self, prompt_tokens: int) -> None:
        """A request was taken up."""
        now = self._clock()
        if self._since is not None:
            self._taken += prompt_tokens
            if now - self._since >= _WINDOW_S:
                new = self._taken / (now - self._since)
                self._rate = _MEMORY * self._rate + (1 - _MEMORY) * new if self._rate else new
                self._since = None
        if not len(self._waiting):
            self._since = None
        elif self._since is None:
            self._since, self._taken = now, 0

    def ended(self, answer_tokens: int) -> None:
        """A sequence has ended by itself."""
        weight = _ANSWER_MEMORY if self._answer else 0.0
        self._answer = weight * self._answer + (1 - weight) * answer_tokens
        self._square = weight * self._square + (1 - weight) * answer_tokens**2

    def check(self, request: AddRequest) -> None:
        """Raises `QueueFullError` where its deadline cannot be kept."""
        if request.deadline_s is None:
            return
        seconds = self.seconds(request)
        if seconds > request.deadline_s:
            message = f"{request.deadline_s:.3g} s are too short: by what waits, this would take {seconds:.3g} s"
            raise QueueFullError(message, seconds - request.deadline_s)

    def seconds(self, request: AddRequest) -> float:
        """Until its end, as far as is known; answers are as long as others' were, and a standard deviation longer."""
        prompt_s = len(request.prompt_token_ids) * self._costs.prompt_token_s
        spread = math.sqrt(max(self._square - self._answer**2, 0.0))
        answer = min(request.max_tokens, self._answer + spread)
        return self._wait_s(request) + prompt_s + answer * self._costs.decode_s

    def _wait_s(self, request: AddRequest) -> float:
        first = self._waiting.first()
        if first is None or request.priority < first.key[0]:
            return 0.0
        rate = self._rate
        if self._since is not None and (passed := self._clock() - self._since) > _WINDOW_S:  # nobody for so long
            rate = min(rate or math.inf, max(self._taken, 1) / passed)
        return self._before(request.tenant) / rate if rate else 0.0

    def _before(self, tenant: Tenant) -> float:
        """Tokens of prompts that are taken up before one of the tenant's."""
        waiting = self._waiting
        if isinstance(waiting, FairQueue):
            return min(waiting.tokens_of(tenant) / waiting.share_of(tenant), waiting.num_tokens)
        return waiting.num_tokens
