"""How long a request will take that comes now: what waits before it, over how fast such work has been taken up, then
its own prompt and answer. Who cannot be served in time is told so at once, not when its time is over."""

from __future__ import annotations

import math
import time
from collections import OrderedDict
from collections.abc import Callable
from collections.abc import Sequence as Sequences

from engine.core.wire import AddRequest
from engine.errors import QueueFullError
from engine.request import Tenant
from engine.scheduling.fair_queue import FairQueue
from engine.scheduling.sequence import Sequence
from engine.scheduling.waiting_queue import WaitingQueue
from engine.step_costs import StepCosts

_WINDOW_S = 0.5
"""over which is seen how fast prompts are taken up, while some wait"""
_MEMORY = 0.8
"""weight of the past in the running mean of that"""
_REMEMBERED_S = _WINDOW_S / (1 - _MEMORY)
_MISSES = 0.025
"""of those that are let in, how many may turn out too late"""
_STEP = 0.04
"""by which the margin grows with each of them"""
_LEAST, _MOST = 1.0, 3.0
_ANSWER_MEMORY = 0.95
"""and of what sequences were"""
_MOST_TIMES = 4.0
"""what one may be of the mean, as far as is learnt from it"""
_MOST_TENANTS = 1024
"""whose answers are known apart"""
_NEAR_S = 0.05
"""before its deadline: what ends then was not in time"""
_FEWEST_TOKENS = 4
"""of an answer that tells how long a token takes"""


class _Running:
    """A mean that forgets, and how far values are from it."""

    def __init__(self) -> None:
        self.mean = self._square = 0.0

    def add(self, value: float) -> None:
        weight = _ANSWER_MEMORY if self.mean else 0.0
        value = min(value, _MOST_TIMES * self.mean or value)  # one that stood still says little of others
        self.mean = weight * self.mean + (1 - weight) * value
        self._square = weight * self._square + (1 - weight) * value**2

    @property
    def high(self) -> float:
        """A standard deviation above the mean, or twice that: what is long past stays longest in squares."""
        return self.mean + min(math.sqrt(max(self._square - self.mean**2, 0.0)), self.mean)


class Expected:
    def __init__(
        self,
        waiting: WaitingQueue,
        running: Sequences[Sequence],
        costs: StepCosts,
        clock: Callable[[], float] = time.monotonic,
        rows: int = 1,
    ) -> None:
        """`rows`: sequences that run at a time."""
        self._waiting, self._running, self._costs, self.clock = waiting, running, costs, clock
        self._rows = rows
        self._rate = 0.0
        """tokens of prompts that were taken up in a second; 0: nobody had to wait yet"""
        self._since: float | None = None
        self._taken = 0
        self._answers: OrderedDict[str, _Running] = OrderedDict()
        """tokens, by the tenants' names: nobody's long answers make others' deadlines too short"""
        self._answer = _Running()
        """of all: for who is new"""
        self._token_s = _Running()
        """seconds of one of them, from when its sequence was taken up to its end"""
        self._margin = 1.25
        """over what is expected of who comes: so large that few of those that are let in turn out too late"""

    def queued(self) -> None:
        """A request is about to wait."""
        if self._since is None or not len(self._waiting):
            self._since, self._taken = self.clock(), 0

    def started(self, prompt_tokens: int) -> None:
        """A request was taken up."""
        now = self.clock()
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

    def ended(self, seq: Sequence, by_itself: bool) -> None:
        """Of one that was broken off it is known that it would have been longer."""
        if seq.deadline is not None:
            self._learn(self.clock() < seq.deadline - _NEAR_S)
        tokens = len(seq.tokens) - seq.prompt_len
        if seq.params.pooling is not None or seq.group is not None or seq.started_at is None:
            return
        answers = self._of(seq.tenant)
        if by_itself or tokens > answers.mean:
            answers.add(tokens)
            self._answer.add(tokens)
        if tokens >= _FEWEST_TOKENS and not seq.interrupted:
            self._token_s.add((self.clock() - seq.started_at) / tokens)

    def _of(self, tenant: str) -> _Running:
        found = self._answers.setdefault(tenant, _Running())
        self._answers.move_to_end(tenant)
        if len(self._answers) > _MOST_TENANTS:
            self._answers.popitem(last=False)
        return found

    def check(self, request: AddRequest) -> None:
        """Raises `QueueFullError` where its deadline cannot be kept."""
        if request.deadline_s is None or self._is_idle(0):
            return
        seconds = self._margin * self.seconds(request)
        if seconds > request.deadline_s:
            raise _too_short(request.deadline_s, seconds)

    def is_late(self, seq: Sequence) -> QueueFullError | None:
        """One that has not begun, and could not end in time if it did now."""
        if not self.would_be_late(seq) or seq.deadline is None:
            return None
        self._learn(False)
        return _too_short(seq.deadline - self.clock(), self._seconds_of(seq))

    def would_be_late(self, seq: Sequence) -> bool:
        """As `is_late`; nothing follows from it."""
        if seq.deadline is None or seq.cached_tokens is not None or self._is_idle(1):
            return False
        return self._seconds_of(seq) > seq.deadline - self.clock()

    def _seconds_of(self, seq: Sequence) -> float:
        return self._service_s(seq.tenant, seq.prompt_len, seq.max_total - seq.prompt_len)

    def _is_idle(self, waiting: int) -> bool:
        """Nothing runs, and no more than that waits: whoever comes is served at once, and shows how long that takes."""
        return not self._running and len(self._waiting) <= waiting

    def _learn(self, kept: bool) -> None:
        """One that was let in has kept its deadline, or has not."""
        change = 1 - _STEP * _MISSES / (1 - _MISSES) if kept else 1 + _STEP
        self._margin = min(max(self._margin * change, _LEAST), _MOST)

    def seconds(self, request: AddRequest) -> float:
        """Until its end, as far as is known."""
        service_s = self._service_s(request.tenant.name, len(request.prompt_token_ids), request.max_tokens)
        return self._wait_s(request) + service_s

    def _service_s(self, tenant: str, prompt: int, most: int) -> float:
        """The tenant's answers are as long as those before, or a little longer, and take as long."""
        answers = self._answers.get(tenant, self._answer)
        token_s = self._token_s.high or self._costs.decode_s
        return prompt * self._costs.prompt_token_s + min(most, answers.high) * token_s

    def _wait_s(self, request: AddRequest) -> float:
        first = self._waiting.first()
        if first is None or request.priority < first.key[0]:
            return 0.0
        rate = self._rate
        if self._since is not None and (passed := self.clock() - self._since) > _WINDOW_S:  # few for so long
            rate = min(rate, (_REMEMBERED_S * rate + self._taken) / (_REMEMBERED_S + passed))
            rate = rate or max(self._taken, first.prompt_len) / passed
        service_s = self._answer.mean * self._token_s.mean
        if rate and service_s:  # whoever runs will leave
            rate = max(rate, sum(seq.prompt_len for seq in self._running) / service_s)
        elif service_s:  # nobody had to wait yet: many have come at once
            prompt = self._waiting.num_tokens / len(self._waiting)
            turns = self._before(request.tenant) / prompt - (self._rows - len(self._running)) + 1
            return max(turns, 0.0) / self._rows * service_s
        return self._before(request.tenant) / rate if rate else 0.0

    def _before(self, tenant: Tenant) -> float:
        """Tokens of prompts that are taken up before one of the tenant's."""
        waiting = self._waiting
        if isinstance(waiting, FairQueue):
            return min(waiting.tokens_of(tenant) / waiting.share_of(tenant), waiting.num_tokens)
        return waiting.num_tokens


def _too_short(left: float, seconds: float) -> QueueFullError:
    message = f"{max(left, 0.0):.3g} s are too short: by what waits and runs, this would take {seconds:.3g} s"
    return QueueFullError(message, seconds - left)
