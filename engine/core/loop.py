"""The engine's main loop, one screen long: what a step is and in which order its parts happen (architecture §2, §4).

The loop knows neither sockets nor processes: messages come from `inbox`, outputs leave as `StepOutputs`. It runs in the
core process (`engine.core.process`) or, for debugging and offline use, in the caller's
(`engine.core.in_process_client`).
"""

from __future__ import annotations

import logging
import time
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from queue import Empty, SimpleQueue

import msgspec

from engine.core.baton import Baton
from engine.core.inbox import (
    STATS_CHANGED,
    STEP_DONE,
    AdapterLoaded,
    GrammarCompiled,
    Inbox,
    Message,
    Post,
    StatsChanged,
)
from engine.core.overdue import Overdue
from engine.core.profiles import CoreProfiles
from engine.core.rounds import Rounds
from engine.core.step_scheduler import KVReports, StepScheduler
from engine.core.step_times import StepTimes
from engine.core.wire import (
    AbortRequests,
    AddRequest,
    CoreStats,
    Delta,
    Phase,
    ResetPrefixCache,
    SequenceDelta,
    SetLogLevel,
    Shutdown,
    StartProfile,
    StepOutputs,
    StepTaken,
    StopProfile,
    UnpinPrefix,
    Vocabulary,
    Wake,
)
from engine.errors import EngineError, InvalidRequestError, QueueFullError, in_words
from engine.executor.interface import Executor, MayComputeInCollect
from engine.kv_transfer.interface import FetchDone, LeaseEnded, News
from engine.observability import step_profile
from engine.observability.step_profile import PartTimes, StepObserver
from engine.step import Rows, StepPlan

logger = logging.getLogger(__name__)


MAX_EMPTY_PLANS = 100
MESSAGES_A_TURN = 512
"""A flood of messages holds up no step for longer than these take."""
NO_STEP = StepPlan(step_id=-1)
"""what a replica has to do in a round of the others"""


class CoreLoop:
    """Plans, submits, collects and completes steps; with two in flight, one step ahead of the device.

    Not thread-safe, but for `inbox` (any thread may put), `take_now` (one other thread may call) and `turns`, `taken`,
    `phase` and `step_times` (any thread may read).
    """

    def __init__(
        self,
        scheduler: StepScheduler,
        executor: Executor,
        steps_in_flight: int,
        inbox: Inbox | None = None,
        observer: StepObserver | None = None,
        set_vocabulary: Callable[[Vocabulary], None] = lambda _: None,
        kv_reports: KVReports | None = None,
        rounds: Rounds | None = None,
        ends: Callable[[], None] = lambda: None,
        post: Post | None = None,
    ) -> None:
        """`observer`: None: times by part are told with the stats. `set_vocabulary`: of whoever compiles grammars.
        `kv_reports`: what is told of the prefix cache. `rounds`: of replicas that take every step together. `ends`:
        called by `close`. `post`: how news come into the inbox from other threads; None: they are put there."""
        self.inbox: Inbox = inbox if inbox is not None else SimpleQueue()
        self.turns = 0
        self.taken = self.news_taken = 0
        self.phase: Phase = "start"
        self.step_times = StepTimes()
        self.stopped = False
        self._scheduler = scheduler
        self._executor = executor
        self._most_in_flight = steps_in_flight
        self._in_flight = 0
        """steps submitted and not collected"""
        self._submitted: deque[tuple[float, int, bool]] = deque()
        """when each of them was submitted, the tokens that it computes beside drafts, and whether the scheduler knows
        of it"""
        self._collected = 0.0
        """when the last one was: the next one takes from then, or from when it was submitted, if that is later"""
        self._done: deque[None] = deque()
        """those of them that can be collected without waiting"""
        self._nothing_to_do = False
        """the last turn neither planned nor collected: only a message can change that"""
        self._empty_plans = 0
        self._has_news = False
        """the stats are worth telling by themselves"""
        self._overdue = Overdue(scheduler)
        self._part_times = PartTimes()
        self._observer = observer or self._part_times
        self._set_vocabulary = set_vocabulary
        self._kv_reports, self._ends = kv_reports, ends
        self._rounds = rounds
        self._inline = isinstance(executor, MayComputeInCollect) and executor.computes_in_collect
        self._baton = Baton()
        self._failed_aside: BaseException | None = None
        """in the thread that receives"""
        self._untold: list[Delta] = []
        """of what was taken while a step computed, and could not be told"""
        self._told_first = False  # by the last turn, instead of collecting
        put = post or self.inbox.put
        self._profiles = CoreProfiles(executor, lambda: put(STATS_CHANGED))

    @property
    def has_work(self) -> bool:
        """False when a turn would do nothing until a message comes."""
        if self._in_flight > 0 or self._scheduler.has_work or self._untold or not self.inbox.empty():
            return True
        return self._rounds is not None and self._rounds.wanted(self._scheduler.is_busy)

    @property
    def is_busy(self) -> bool:
        """There are requests."""
        stats = self._scheduler.stats()
        return stats.running + stats.waiting > 0

    def run(self, publish: Callable[[StepOutputs], None]) -> None:
        """Turn until `Shutdown`. Where `publish` blocks, the core waits. An exception of scheduler or executor passes
        through."""
        while not self.stopped:
            outputs = self.turn()
            if outputs is not None:
                publish(outputs)

    def close(self) -> None:
        """What it has to say is said. Idempotent."""
        if self._kv_reports is not None:
            self._kv_reports.close()
        self._ends()

    def turn(self, wait: bool = True) -> StepOutputs | None:
        """One turn; None where there is nothing to tell. With `wait` an idle core blocks until a message comes.

        With one step ahead, step N+1 is planned and submitted before step N is collected, so everything on the host,
        from `complete` through publishing to the next `plan`, happens while the device computes. While a step computes
        and there is nothing to plan, the turn waits for the step and for messages at once: an abort frees its blocks,
        and a new request is planned, without waiting for the step to end.
        """
        self._observer.mark(step_profile.PLAN)
        deltas = self._take_untold() + self._drain(wait)
        if self.stopped:
            return None
        deltas += self._overdue.end()
        planned = False
        while self._plan_ahead():
            planned = True
            deltas += self._scheduler.end_failed()
        deltas += self._scheduler.end_failed()
        self._send_masks()
        step: StepTaken | None = None
        collected = bool(self._done) and not self._tells_first(deltas)
        if collected:
            step, brought = self._collect()
            deltas += brought
            self._send_masks()
        self._observer.mark(step_profile.PUBLISH)
        self._nothing_to_do = not planned and not collected and not self._done
        self._guard_against_stall(progress=not self._nothing_to_do or bool(deltas) or self._in_flight > 0)
        if not self._nothing_to_do:
            self.turns += 1
        has_news, self._has_news = self._has_news, False
        kv_events = None if self._kv_reports is None else self._kv_reports.take()
        if step is None and not deltas and not has_news and kv_events is None:
            return None
        return StepOutputs(deltas=deltas, stats=self._stats(), step=step, kv_events=kv_events)

    def _tells_first(self, deltas: list[Delta]) -> bool:
        """Where `collect` computes the step, what came while it was planned does not wait for it, nor does what there
        is to tell; once a step, whatever else comes."""
        if not self._inline:
            return False
        deltas += self._take_waiting()
        self._told_first = bool(deltas) and not self._told_first
        return self._told_first

    def _plan_ahead(self) -> bool:
        """Whether there was room for one more step, and something for it to do."""
        if self._in_flight >= self._most_in_flight:
            return False
        self.phase = "plan"
        rounds, busy = self._rounds, self._rounds is not None and self._scheduler.is_busy
        if rounds is not None and not rounds.wanted(busy):
            return False
        known = plan = self._scheduler.plan()
        if rounds is not None:
            plan = msgspec.structs.replace(plan or NO_STEP, round=rounds.begin(busy))
        if plan is not None:
            self.phase = "submit"
            self._observer.mark(step_profile.SUBMIT)
            self._executor.submit(plan, self._step_done)
            self._submitted.append((time.perf_counter(), _certain(plan.rows), known is not None))
            self._in_flight += 1
        return plan is not None

    def _send_masks(self) -> None:
        """While the forward pass runs that they are for."""
        masks = self._scheduler.masks()
        if masks is not None:
            self._executor.sample(masks)

    def _step_done(self) -> None:
        """From any thread. The message only wakes the loop: messages before it must not hold the step up."""
        self._done.append(None)
        self.inbox.put(STEP_DONE)

    def _collect(self) -> tuple[StepTaken | None, Sequence[Delta]]:
        self.phase = "collect"
        self._observer.mark(step_profile.COLLECT)
        submitted, tokens, known = self._submitted.popleft()
        began = time.perf_counter() if self._inline else max(submitted, self._collected)
        with self._baton if self._inline else nullcontext():
            result = self._executor.collect()
        self._collected = time.perf_counter()
        if self._failed_aside is not None:
            raise self._failed_aside
        self._in_flight -= 1
        self._done.popleft()
        self.phase = "complete"
        self._observer.mark(step_profile.COMPLETE)
        seconds = self._collected - began
        self.step_times.add(seconds)
        if self._rounds is not None:
            self._rounds.ended(result.round)
        if not known:
            return None, self._take_untold()
        deltas = [*self._take_untold(), *self._scheduler.complete(result, seconds)]
        return StepTaken(seconds, tokens + sum(result.drafted)), deltas

    def _take_untold(self) -> list[Delta]:
        untold, self._untold = self._untold, []
        return untold

    def take_now(self, message: Message, tell: Callable[[StepOutputs], bool]) -> bool:
        """From the thread that receives, when all messages before it are taken: while the loop's thread computes, who
        comes is queued or refused, and who leaves is let go. `tell`: False where nothing can be sent now; the loop does
        it then. False: the message is to wait in the inbox."""
        if not isinstance(message, (AddRequest, AbortRequests)) or not self._baton.take():
            return False
        try:
            deltas = self._apply(message)
            aside = StepOutputs(deltas=list(deltas), stats=self._stats(), aside=True) if deltas else None
            if aside is not None and (self._untold or not tell(aside)):
                self._untold += deltas
        except BaseException as error:  # the loop's to raise, which ends the core and says why
            self._failed_aside = self._failed_aside or error
        finally:
            self._baton.give_back()
        return True

    def _drain(self, wait: bool) -> list[Delta]:
        deltas: list[Delta] = []
        waits_for_step = self._in_flight > 0 and self._nothing_to_do
        if waits_for_step or (wait and not self.has_work):
            self.phase = "collect" if waits_for_step else "idle"
            self._observer.mark(step_profile.WAIT if waits_for_step else step_profile.IDLE)
            message = self.inbox.get()
            self.phase = "plan"
            self._observer.mark(step_profile.PLAN)
            deltas += self._apply(message)
        return deltas + self._take_waiting()

    def _take_waiting(self) -> list[Delta]:
        deltas: list[Delta] = []
        for _ in range(MESSAGES_A_TURN):
            if self.stopped:
                break
            try:
                message = self.inbox.get_nowait()
            except Empty:
                break
            deltas += self._apply(message)
        return deltas

    def _apply(self, message: Message) -> Sequence[Delta]:
        if message is STEP_DONE:
            return []
        if isinstance(message, (StatsChanged, GrammarCompiled, AdapterLoaded, FetchDone, LeaseEnded)):
            self.news_taken += 1
            return self._hear(message)
        self.taken += 1
        match message:
            case AddRequest():
                return self._add(message)
            case AbortRequests():
                return self._scheduler.abort(message.request_ids)
            case UnpinPrefix():
                self._scheduler.unpin(message.name)
                self._has_news = True
                return []
            case Vocabulary():
                self._set_vocabulary(message)
            case ResetPrefixCache():
                self._scheduler.reset_prefix_cache()
            case Wake():
                if self._rounds is not None:
                    self._rounds.wake(message.number)
            case StartProfile() | StopProfile():
                self._profiles.take(message, self._part_times.seconds_so_far)
            case SetLogLevel():
                logging.getLogger().setLevel(message.level)
            case Shutdown():
                self.stopped = True
            case SequenceDelta():
                return [message]
        return []

    def _hear(self, message: StatsChanged | GrammarCompiled | AdapterLoaded | News) -> Sequence[Delta]:
        if isinstance(message, GrammarCompiled):
            return self._scheduler.grammar_compiled(message.grammar)
        if isinstance(message, AdapterLoaded):
            return self._scheduler.adapter_loaded(message.adapter)
        self._has_news = True
        if not isinstance(message, StatsChanged):
            return self._scheduler.transferred(message)
        if message is StatsChanged.PIECES_TOOK_OVER:
            self._scheduler.steps_changed()
        return []

    def _add(self, request: AddRequest) -> Sequence[Delta]:
        """A refused request fails alone, as a delta of its own."""
        try:
            self._scheduler.add(request)
        except QueueFullError as error:
            return [refusal(request.request_id, error.kind, error)]
        except InvalidRequestError as error:
            return [refusal(request.request_id, "invalid", error)]
        except Exception as error:
            logger.exception("request %r could not be added", request.request_id)
            self._scheduler.abort(request.request_ids)  # what of it came as far as the queue
            return [refusal(request.request_id, "fault", error)]
        self._overdue.add(request)
        return []

    def _stats(self) -> CoreStats:
        stats = self._scheduler.stats()
        compiles, state = self._executor.compiles_after_ready(), self._executor.compile_state()
        return msgspec.structs.replace(
            stats,
            compiles_after_ready=compiles,
            compiling=state == "running",
            compile_failed=state == "failed",
            profiling=self._profiles.running,
            profile_orders=self._profiles.taken,
            core_parts_s=self._part_times.seconds(),
            step_parts_s=self._executor.part_seconds(),
            expert_tokens=0 if self._rounds is None else self._rounds.expert_tokens,
            experts_moved=0 if self._rounds is None else self._rounds.experts_moved,
        )

    def _guard_against_stall(self, progress: bool) -> None:
        """A scheduler may need an empty plan or two (preemption), but must not keep the core spinning for ever."""
        if progress or not self._scheduler.has_work:
            self._empty_plans = 0
            return
        self._empty_plans += 1
        if self._empty_plans > MAX_EMPTY_PLANS:
            raise EngineError(f"the scheduler has work but plans nothing, with no step in flight: {self._stats()}")


def _certain(rows: Rows) -> int:
    """Tokens without drafts, which are planned before anybody knows whether there are so many."""
    samples = rows.samples
    drafts = int(samples.sum()) - int((samples > 0).sum()) if len(samples) and samples.max() > 1 else 0
    return rows.num_tokens - drafts


def refusal(request_id: str, kind: str, error: Exception) -> SequenceDelta:
    """The only delta of a request that was never admitted."""
    text = str(error) if isinstance(error, EngineError) else in_words(error)
    after = error.retry_after_s if isinstance(error, QueueFullError) else 1.0
    return SequenceDelta(request_id=request_id, finish_reason="error", error=text, error_kind=kind, retry_after_s=after)
