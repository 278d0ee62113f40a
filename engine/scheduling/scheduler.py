"""The scheduler: which sequences compute how many tokens in the next step.

There are no phases. Every sequence has ``computed < known tokens``, and one token budget per step closes the gap, so
chunked prefill, resuming after preemption and decoding are the same thing. `plan` may run one or more steps ahead of
`complete`: ``computed`` advances when a step is planned, and ``known`` counts the tokens that have not arrived, too
(`RunningRows`).

A step costs O(sequences scheduled): waiting sequences are looked at one by one from the head of a heap until one does
not fit, and a context's length matters only when its row starts.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable

from engine.adapters.interface import AdapterLoader
from engine.adapters.request import LoRARequest
from engine.config import SchedulerConfig
from engine.core.wire import AddRequest, CoreStats, Delta, SequenceDelta
from engine.grammars.interface import Grammars
from engine.kv_cache.kv_cache import KVCache
from engine.kv_cache.leases import Leases
from engine.kv_cache.sequence_blocks import Growth
from engine.kv_transfer.interface import Connector, LeaseEnded, News
from engine.scheduling.adapted import Adapted
from engine.scheduling.admission import Admission
from engine.scheduling.arrivals import Arrivals
from engine.scheduling.constrained import Constrained
from engine.scheduling.crowds import Crowds
from engine.scheduling.expected import Expected
from engine.scheduling.fair_queue import FairQueue
from engine.scheduling.fetches import Fetches
from engine.scheduling.figures import core_stats
from engine.scheduling.holdings import Holdings, urgency
from engine.scheduling.micro_batches import most_prompt_tokens
from engine.scheduling.outcomes import Outcomes
from engine.scheduling.placement import Placement
from engine.scheduling.preemption import PreemptionCosts
from engine.scheduling.running_rows import RunningRows
from engine.scheduling.sequence import Sequence, Status
from engine.scheduling.speculation import Speculation
from engine.scheduling.step_draft import StepDraft
from engine.scheduling.steps_in_flight import StepsInFlight
from engine.step import StepMasks, StepPlan, StepResult
from engine.step_costs import StepCosts


class Scheduler:
    """Owns rows 0 .. max_num_seqs-1 and, through ``kv``, every KV block. Not thread-safe: one thread at a time calls
    it (`engine/core/baton.py`)."""

    def __init__(
        self,
        config: SchedulerConfig,
        kv: KVCache,
        swap_block_s: float = 0.0,
        grammars: Grammars | None = None,
        exact: bool = False,
        connector: Connector | None = None,
        adapters: AdapterLoader | None = None,
        clock: Callable[[], float] = time.monotonic,
        begun: Callable[[str], None] = lambda _: None,
    ) -> None:
        """`swap_block_s`: seconds that a block takes to the host tier and back. `exact`: nothing is planned of a
        sequence before it is known how many of its drafts were right. `connector`: to other engines, if any.
        `adapters`: who loads them, if there are any. `begun`: is told of each sequence that a step is to take up for
        the first time, before it does, and of one for which something is prepared."""
        self._config = config
        self._kv = kv
        self._costs = StepCosts()
        rows = RunningRows(config.max_num_seqs, exact, config.stages, config.row_tokens, bool(kv.states.groups))
        self._leases = Leases(kv, connector)
        self._steps = StepsInFlight()
        self._adapted = Adapted(self._steps, adapters, config.max_num_seqs, begun)
        preemption = PreemptionCosts(config.preemption, swap_block_s, self._costs)
        fair = FairQueue(config.max_num_batched_tokens) if config.policy == "fair" else None
        self._held = Holdings(kv, rows, preemption, self._leases, self._adapted, fair)
        self._speculation = Speculation(self._held, config.speculation, config.max_drafts, self._costs)
        self._running = self._held.running
        budget = config.max_num_batched_tokens
        self._expected = Expected(self._held, self._costs, config.max_num_seqs, budget, config.stages, clock, begun)
        self._outcomes = Outcomes(self._held, self._speculation, self._expected)
        self._live, self._waiting = self._held.live, self._held.waiting
        self._rows = self._held.rows
        self._constrained = Constrained(self._held, self._steps, grammars, self._adapted, begun)
        self._fetches = Fetches(self._held, self._steps, connector, begun)
        self._arrivals = Arrivals(config, self._held, self._constrained, self._fetches, self._adapted, self._expected)
        self._num_steps = 0
        self._late: list[SequenceDelta] = []
        self._placement = Placement(self._held)
        self._crowds = Crowds(self._held, budget)
        self._admission = Admission(config, self._held, self._placement, self._expected, self._crowds)

    # -- requests ----------------------------------------------------------------------------------------------------

    def add(self, request: AddRequest) -> None:
        """Queue a request. `InvalidRequestError` if it can never be served, `QueueFullError` if too many wait."""
        self._arrivals.add(request)

    def abort(self, request_ids: Iterable[str]) -> list[SequenceDelta]:
        """End requests in whatever state they are; ids that are not live are ignored. Tokens in flight will be
        dropped."""
        deltas = []
        for request_id in request_ids:
            seq = self._live.get(request_id)
            if seq is not None:
                self._expected.ended(seq, by_itself=False)
                self._held.end(seq)
                ended = [request_id] if seq.group is None else seq.group.request_ids
                deltas += [SequenceDelta(request_id=each, finish_reason="abort") for each in ended]
        return deltas

    def end_failed(self) -> list[SequenceDelta]:
        """End the requests of which anything failed since the last call, and tell of those that have become too late to
        begin. To be called behind every `plan`."""
        deltas, self._late = self._late, []
        for seq, reason, kind in self._held.failures.take():
            if seq.status is not Status.FINISHED:
                deltas += self._end_with_error(seq, reason, kind)
        for seq, reason in self._adapted.take_failed():
            was_checked = seq.adapter is not None and seq.adapter.version
            deltas += self._end_with_error(seq, reason, "fault" if was_checked else "invalid")
        return deltas

    def grammar_compiled(self, grammar: str) -> list[SequenceDelta]:
        """Those that wait for it may start, or end with what is wrong with it."""
        failed = self._constrained.compiled(grammar)
        return [delta for seq, reason in failed for delta in self._end_with_error(seq, reason, "invalid")]

    def adapter_loaded(self, adapter: LoRARequest) -> list[SequenceDelta]:
        """Those that wait for it may start, or end with what is wrong with it."""
        self._adapted.loaded(adapter)
        return self.end_failed()

    def steps_changed(self) -> None:
        """They cost otherwise from now on: compiled pieces took over."""
        self._costs.forget()

    def transferred(self, news: News) -> list[SequenceDelta]:
        """Pages have come, or will not; a lease is over."""
        if isinstance(news, LeaseEnded):
            self._leases.end(news.generation, news.expired)
            return []
        failed = self._arrivals.landed(news)
        return [] if failed is None else self._end_with_error(*failed, "invalid")

    def has_begun(self, request_id: str) -> bool:
        """A step has taken it up; true for one that is over, too."""
        seq = self._live.get(request_id)
        return seq is None or seq.cached_tokens is not None

    def give_up(self, request_id: str) -> list[SequenceDelta]:
        """End a request that no step has taken up yet, because it has waited for too long; nothing for any other."""
        if self.has_begun(request_id):
            return []
        return self._end_with_error(self._live[request_id], "it waited for its turn for too long", "queue_full")

    def _end_with_error(self, seq: Sequence, reason: str, kind: str, retry_after_s: float = 1.0) -> list[SequenceDelta]:
        return [
            SequenceDelta(
                request_id=each, finish_reason="error", error=reason, error_kind=kind, retry_after_s=retry_after_s
            )
            for each in self._held.end_request(seq)
        ]

    # -- planning ----------------------------------------------------------------------------------------------------

    def plan(self) -> StepPlan | None:
        """The next step, or None when nothing can be computed before results arrive (or at all)."""
        if self._adapted.wants_rest:
            if self._steps:
                return None
            self._adapted.go_on()
        while (late := self._admission.late()) is not None:
            self._late += self._end_with_error(late[0], str(late[1]), late[1].kind, late[1].retry_after_s)
        self._place_ready()
        if gave_way := self._adapted.take_those_that_give_way():
            for samples in gave_way:
                self._held.unqueue(samples)
            self._adapted.go_on()
            self._place_ready()
        while True:
            draft, preempted = self._draft()
            step = draft.planned()
            if len(step.rows):
                break
            draft.drop()  # what was to start has failed, or those that had a share gave way to those of another step
            if not (preempted or self._crowds.gave_way) or self._steps:
                return None
        transfers = self._kv.take_transfers()
        bundles = self._kv.states.told([*draft.copies, *transfers[1]])
        self._crowds.planned(step)
        plan = draft.plan(self._num_steps, step, self._rows.take_released(), transfers, bundles)
        self._steps.push(self._num_steps, step)
        self._num_steps += 1
        return plan

    def _place_ready(self) -> None:
        for samples in self._adapted.take_ready():
            self._constrained.place(samples)

    def _draft(self) -> tuple[StepDraft, bool]:
        """A step, and whether anybody was preempted for it."""
        budget = self._config.max_num_batched_tokens
        self._admission.make_way()
        self._speculation.choose(budget, len(self._waiting) > 0)
        plain, others = self._rows.split(budget)
        self._crowds.begin()
        if self._config.stages == 1:
            plain, others = self._crowds.make_way(self._admission.who_starts(), plain, others)
        draft = StepDraft(budget, self._rows, plain)
        preempted = self._schedule_running(draft, others)
        if not preempted:
            self._admission.admit(draft)
        return draft, preempted

    def _schedule_running(self, draft: StepDraft, others: list[Sequence]) -> bool:
        """Shares of the budget for running sequences, decodes before prefills; returns whether any was preempted.
        `others`: those beside the draft's plain rows."""
        decoding: list[Sequence] = []
        prefilling: list[Sequence] = []
        for seq in others:
            (decoding if self._rows.remaining(seq) == 1 else prefilling).append(seq)
        preempted = self._share(draft, decoding, [1] * len(decoding))
        most = self._config.max_mixed_prefill_tokens
        if most is not None and (draft.tentative or len(draft.plain)):
            draft.budget = min(draft.budget, most)  # those who decode wait for the whole step
        if self._config.stages > 1:
            pending = sum(map(self._rows.remaining, prefilling)) + self._admission.waiting_tokens
            part = most_prompt_tokens(pending, self._config.stages, self._config.min_shared_chunk // 2)
            draft.budget = min(draft.budget, part)
        prefilling.sort(key=urgency)
        preempted |= self._share(draft, prefilling, self._admission.shares(draft, prefilling))
        self._add_drafts(draft, decoding)
        draft.place_plain()
        for seq, (query_len, growth) in draft.tentative.items():
            try:
                self._placement.place(draft, seq, query_len, growth)
            except Exception as error:
                self._held.failures.note(seq, error)
        return preempted

    def _share(self, draft: StepDraft, sequences: list[Sequence], shares: list[int]) -> bool:
        """Room and its share of the budget for each, in order, as far as it goes. Whether any was preempted."""
        preempted = False
        for seq, share in zip(sequences, shares, strict=True):
            query_len = min(share, draft.budget)
            # Those that a sequence before them has preempted run no more.
            if query_len > 0 and seq.status is Status.RUNNING:
                try:
                    growth = self._held.append(seq, query_len)
                    if growth is None and self._rows.unsure.any():
                        self._rows.drafts[:] = 0  # what wrong ones hold comes back before anybody is preempted
                    elif growth is None:
                        preempted = True
                        growth = self._make_room(draft, seq, query_len)
                    if growth is not None:
                        draft.tentative[seq] = (query_len, growth)
                        draft.budget -= query_len
                except Exception as error:
                    self._held.failures.note(seq, error)
        return preempted

    def _add_drafts(self, draft: StepDraft, decoding: list[Sequence]) -> None:
        """Behind everybody's certain tokens, as far as there is room: they preempt nobody."""
        for seq in decoding:
            drafts = min(int(self._rows.drafts[seq.row]), draft.budget) if seq in draft.tentative else 0
            if drafts > 0:
                with self._held.failures.isolate(seq):
                    more = self._held.append(seq, 1, drafts)
                    if more is not None:
                        draft.tentative[seq] = (1 + drafts, draft.tentative[seq][1].with_more(more))
                        draft.budget -= drafts

    def _make_room(self, draft: StepDraft, seq: Sequence, query_len: int) -> Growth | None:
        """End leases, then preempt those that came last, until there is room; None: it was itself the last."""
        while True:
            if not self._leases.give_way():
                victims = self._held.preempt_latest(draft.tentative)
                draft.give_back(victims)
                if seq in victims:
                    return None
            growth = self._held.append(seq, query_len)
            if growth is not None:
                return growth

    def masks(self) -> StepMasks | None:
        """What the oldest step in flight waits for before it samples, once; None where it waits for nothing. All steps
        before it are complete, so it is known what may come next."""
        return self._constrained.masks()

    # -- results -----------------------------------------------------------------------------------------------------

    def complete(self, result: StepResult, seconds: float = 0.0) -> list[Delta]:
        """What the oldest step in flight brought: tokens, ends, faults. Results arrive in the order of plans.
        `seconds`: what it took, if that is known."""
        step = self._steps.pop(result)
        self._fetches.go_on()
        self._adapted.go_on()
        self._expected.stepped()
        if seconds:
            self._costs.observe(step.rows, sum(result.drafted), seconds)
        if self._held.fair is not None:
            self._held.fair.sampled(step, result.counts)
        return [*self._outcomes.of(step, result), *self.end_failed()]

    # -- state -------------------------------------------------------------------------------------------------------

    @property
    def is_busy(self) -> bool:
        """A sequence is unfinished, or a step is unanswered."""
        return bool(self._live or self._steps)

    @property
    def has_work(self) -> bool:
        """A sequence is unfinished that waits for no grammar, adapter or pages, or a step is unanswered."""
        if self._adapted.has_news or not (len(self._constrained) or len(self._adapted) or len(self._fetches)):
            return bool(self._live or self._steps)
        elsewhere = (Status.PREPARING, Status.FETCHING)
        return bool(self._steps) or any(seq.status not in elsewhere for seq in self._live.values())

    def unpin(self, name: str) -> None:
        """A pinned prefix becomes an ordinary cached one; unknown names are ignored."""
        self._held.pins.release(name)

    def reset_prefix_cache(self) -> int:
        """Forget every cached block that no sequence uses; returns their number."""
        return self._kv.reset_prefix_cache()

    def stats(self) -> CoreStats:
        """All but ``compiles_after_ready``, which the executor knows."""
        return core_stats(
            self._held,
            self._arrivals,
            self._fetches,
            self._speculation,
            self._outcomes,
            self._num_steps,
            self._admission.prompt_tokens,
        )
