"""Who cannot be served within its deadline, or makes others miss theirs, is told so when it comes, not when its time is
over: by how long answers were (`Answers`), what steps cost (`StepCosts`), and what runs and waits (`Forecast`)."""

from __future__ import annotations

import math
import time
from collections import deque
from collections.abc import Callable

import numpy as np

from engine.core.wire import AddRequest
from engine.errors import TooShortError
from engine.request import Tenant
from engine.scheduling.answers import Answers, RunningMean
from engine.scheduling.forecast import Forecast, Job, Prices
from engine.scheduling.holdings import Holdings
from engine.scheduling.margin import Margin
from engine.scheduling.return_times import ReturnTimes
from engine.scheduling.sequence import Sequence
from engine.step_costs import StepCosts

_LAST, _AT_ONCE_S = 16, 1e-6
"""those that came, by which it is told how many come; seconds in which nobody comes"""
_LEAST_S = 1.0
"""before one asks again for whom there is no place"""
_FEWEST_TOKENS = 4
"""of an answer that tells how many steps a token takes"""


class Expected:
    def __init__(
        self,
        held: Holdings,
        costs: StepCosts,
        rows: int,
        budget: int,
        stages: int = 1,
        clock: Callable[[], float] = time.monotonic,
        begun: Callable[[str], None] = lambda _: None,
    ) -> None:
        """`rows`: sequences that run at a time, of which each step has one in `stages`. `budget`: tokens of a step.
        `begun`: is told of each that starts."""
        self._held, self._costs, self._rows, self._budget, self._stages = held, costs, rows, budget, stages
        self.clock, self._begun = clock, begun
        self._waiting, self._running = held.waiting, held.running
        self.answers = Answers()
        self._token_steps = RunningMean()
        """of a token of an answer: fewer than one where drafts are right, more where stages take turns"""
        self._prompts, self._computed = RunningMean(), RunningMean()
        """tokens of a prompt that no cache had, and which part of it they are"""
        self._fitted, self._full = RunningMean(memory=0.995), 0
        """rows in use while others wait for them; now, and 0 while nobody does"""
        self.steps = 0
        """since the start"""
        self._margin = Margin(self.clock())
        self._looked_at = 0
        """in which step it was"""
        self._came: deque[float] = deque([self.clock()], maxlen=_LAST)
        """when the last ones did"""
        self._returns = ReturnTimes()

    # -- learning ----------------------------------------------------------------------------------------------------

    def stepped(self) -> None:
        """A step has ended."""
        self.steps += 1
        if self._full:
            self._fitted.add(self._full)

    def no_more_fit(self) -> None:
        """Who waits does so for a row, or for blocks: not for its turn to compute a prompt, nor for the next step."""
        self._full = self._rows - len(self._held.rows.free)

    def more_fit(self) -> None:
        """Nobody waits, or for nothing else than that."""
        self._full = 0

    def started(self, seq: Sequence) -> None:
        """For the first time."""
        self._begun(seq.request_id)
        seq.started_at = self.clock()
        if seq.prompt_len and _leads(seq):
            computed = seq.prompt_len - (seq.cached_tokens or 0)
            self._prompts.add(computed)
            self._computed.add(computed / seq.prompt_len)

    def began(self, seq: Sequence) -> None:
        """Its first token is there."""
        seq.first_step = self.steps

    def ended(self, seq: Sequence, by_itself: bool) -> None:
        tokens, most = _had(seq), seq.max_total - seq.prompt_len
        if seq.params.pooling is not None or seq.group is not None or seq.started_at is None:
            return
        self.answers.ended(seq.tenant, tokens, most, by_itself)
        if seq.first_step and tokens >= _FEWEST_TOKENS and not seq.interrupted:
            self._token_steps.add((self.steps - seq.first_step) / (tokens - 1))

    # -- who comes ---------------------------------------------------------------------------------------------------

    def check(self, request: AddRequest) -> tuple[float, float] | None:
        """Seconds and steps that it will take, if it is let in for a deadline that can be kept. Raises `TooShortError`
        where it cannot be kept, or others' that run."""
        now = self.clock()
        self._came.append(now)
        self._returns.came(_line(request), now)
        if request.deadline_s is None:
            return None
        job, forecast = self._job(request), self._forecast(request)
        try:
            self._check(request, request.deadline_s, job, forecast)
        except TooShortError as error:
            if request.accepted or self._is_idle(0):
                return None
            error.retry_after_s = self._returns.take(_line(request), now, error.retry_after_s, forecast.takes_s(job))
            raise
        return forecast.seconds(job), job.steps

    def when_room(self, request: AddRequest) -> float:
        """Seconds until one is to ask again for whom there is no place among those that wait."""
        now, each_s = self.clock(), self._forecast(request).takes_s(self._job(request))
        self._returns.came(_line(request), now)
        return self._returns.take(_line(request), now, max(each_s, _LEAST_S), each_s)

    def _check(self, request: AddRequest, deadline_s: float, job: Job, forecast: Forecast) -> None:
        now, steps = self.clock(), self._steps_left()
        alone = forecast.running_s(steps)
        until = np.array([seq.deadline for seq in self._running], dtype=float)  # NaN: there is none
        if self._looked_at != self.steps:
            self._looked_at = self.steps
            self._look(now, deadline_s, until, forecast)
        margin, left = self._margin.times, until - now
        seconds = margin * forecast.seconds(job)
        if seconds > deadline_s:
            raise _too_short(deadline_s, seconds)
        beside = alone + forecast.delays_s(steps, job)
        # Those that would be late anyway, beyond all doubt, keep nobody out.
        late = (alone <= margin * left) & (margin * beside > left) & (beside > alone)
        late &= self._protected(request)
        if late.any():
            ends = float(alone[late].max())
            raise TooShortError(f"what runs would miss its deadlines beside this; it ends in {ends:.3g} s", ends)

    def _look(self, now: float, deadline_s: float, until: np.ndarray, forecast: Forecast) -> None:
        """One of each request says how much longer its steps take than was expected: as many as were expected, not as
        many as it turns out to need, which is nobody else's fault."""
        nothing = math.nan, math.nan
        known = [(seq.arrived_at, _had(seq), *((_leads(seq) and seq.promised) or nothing)) for seq in self._running]
        came, had, expected, promised = np.array(known, dtype=float).reshape(-1, 4).T
        left = promised - had * self._steps_a_token
        expected[~(left >= 0.0)] = math.nan
        self._margin.look(now, deadline_s, until - came, expected, now + forecast.known_s(left) - came)

    def seconds(self, request: AddRequest) -> float:
        """Until its end, as far as is known."""
        return self._forecast(request).seconds(self._job(request))

    def _is_idle(self, waiting: int) -> bool:
        """Nothing runs, and no more than that waits: whoever comes is served at once, and shows how long that takes."""
        return not self._running and len(self._waiting) <= waiting

    def _job(self, request: AddRequest) -> Job:
        """The tenant's answers are as long as those before, or a little longer."""
        rows = request.beams.width if request.beams is not None else 1 + len(request.followers)
        steps = sum(self.answers.expected(request.tenant.name, request.max_tokens)) * self._steps_a_token
        return Job(steps, len(request.prompt_token_ids) * (self._computed.mean or 1.0), rows)

    @property
    def _steps_a_token(self) -> float:
        return self._token_steps.mean or 1.0

    def _forecast(self, request: AddRequest) -> Forecast:
        first, waiting = self._waiting.first(), self._waiting
        rows_waiting = len(waiting) + self._held.following
        before = min(rows_waiting, max(self._rows_that_fit() - len(self._running), 0))  # for whom there is a row
        if first is not None and request.priority >= first.key[0]:
            before = max(before, round(rows_waiting * self._before(request.tenant) / max(waiting.num_tokens, 1)))
        prompts, at = np.array([(seq.prompt_len, seq.row) for seq in self._running], dtype=np.int64).reshape(-1, 2).T
        prompt_tokens = float(np.maximum(prompts - self._held.rows.computed[at], 0).sum())
        return self._behind(before, prompt_tokens)

    def _behind(self, before: int, prompt_tokens: float) -> Forecast:
        """For one that comes behind as many that wait, while of those that run so much of their prompts is left."""
        waiting = self._waiting
        return Forecast(
            self._prices,
            Job(self.answers.mean * self._steps_a_token, self._prompts.mean),
            len(self._came) / max(self.clock() - self._came[0], _AT_ONCE_S),
            len(self._running),
            self._rows_that_fit(),
            prompt_tokens,
            before,
            waiting.most_tokens / len(waiting) * self._steps_a_token if len(waiting) else math.inf,
            waiting.num_tokens / max(len(waiting) + self._held.following, 1) * (self._computed.mean or 1.0),
            self._budget,
        )

    def _steps_left(self) -> np.ndarray:
        """Of those that run, as many as they may well need."""
        running = self._running
        known = [(seq.max_total - seq.prompt_len, _had(seq)) for seq in running]
        most, had = np.array(known, dtype=np.int64).reshape(-1, 2).T
        return self._steps_a_token * self.answers.left([seq.tenant for seq in running], most, had)

    def _rows_that_fit(self) -> int:
        """At a time, and no fewer than run now: as many as there are if others wait for them to end; if they wait for
        their turn, as many as there have been when others did."""
        fit = self._running and len(self._waiting) and (self._full or round(self._fitted.mean))
        return min(self._rows, max(fit, len(self._running))) if fit else self._rows

    @property
    def _prices(self) -> Prices:
        step_s, row_s = self._costs.rows_s()
        return Prices(step_s, row_s / self._stages, self._costs.prompt_token_s)

    def _before(self, tenant: Tenant) -> float:
        """Tokens of prompts that are taken up before one of the tenant's."""
        waiting, fair = self._waiting, self._held.fair
        if fair is None:
            return waiting.num_tokens
        return min(fair.tokens_of(tenant) / fair.share_of(tenant), waiting.num_tokens)

    def _protected(self, request: AddRequest) -> np.ndarray:
        """Of those that run, whose deadlines count: who was let in for one that could be kept, and is as urgent. Where
        the policy is fair, not those of another tenant that runs as much as the one who comes would, for its weight."""
        fair = self._held.fair
        own = None if fair is None else fair.share_with(request.tenant)
        counts = [seq.promised is not None and seq.key[0] <= request.priority for seq in self._running]
        if own is not None:
            name = request.tenant.name
            accounts = [(seq.tenant == name, seq.account) for seq in self._running]
            counts = [
                counted and account is not None and (account.share < own or (same and account.share <= own))
                for counted, (same, account) in zip(counts, accounts, strict=True)
            ]
        return np.array(counts, dtype=bool)

    # -- who waits ---------------------------------------------------------------------------------------------------

    def is_late(self, seq: Sequence) -> TooShortError | None:
        """One that has not begun, and could not end in time if it did now."""
        if not self.would_be_late(seq) or seq.deadline is None:
            return None
        now, seconds = self.clock(), self._service_s(seq)
        error = _too_short(seq.deadline - now, seconds)
        line, each_s = (seq.tenant, seq.key[0]), seconds / max(len(self._running), 1)
        error.retry_after_s = self._returns.take(line, now, error.retry_after_s, each_s)
        return error

    def would_be_late(self, seq: Sequence) -> bool:
        """As `is_late`; nothing follows from it."""
        if seq.deadline is None or seq.cached_tokens is not None or seq.begun or self._is_idle(1):
            return False
        return self._service_s(seq) > seq.deadline - self.clock()

    def _service_s(self, seq: Sequence) -> float:
        """Beside as many as run now, and those that follow them."""
        steps = self.answers.expected(seq.tenant, seq.max_total - seq.prompt_len)[0] * self._steps_a_token
        prompt_s = seq.prompt_len * (self._computed.mean or 1.0) * self._prices.prompt_token_s
        return prompt_s + steps * self._behind(0, 0.0).step_s(len(self._running) + len(seq.siblings))


def _line(request: AddRequest) -> tuple[str, int]:
    """Who is in each other's way."""
    return request.tenant.name, request.priority


def _leads(seq: Sequence) -> bool:
    """One of each request does."""
    return not seq.siblings or seq is seq.siblings[0]


def _had(seq: Sequence) -> int:
    return len(seq.tokens) - seq.prompt_len


def _too_short(left: float, seconds: float) -> TooShortError:
    message = f"{max(left, 0.0):.3g} s are too short: by what waits and runs, this would take {seconds:.3g} s"
    return TooShortError(message, seconds - left)
