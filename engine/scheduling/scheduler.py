"""The scheduler: which sequences compute how many tokens in the next step, and what the results of a step mean.

There are no phases. Every sequence has ``computed < known tokens``, and one token budget per step closes the gap, so
chunked prefill, resuming after preemption and decoding are the same thing. `plan` may run one or more steps ahead of
`complete`: ``computed`` advances when a step is planned, and `Sequence.in_flight` counts the tokens that have not
arrived.

A step costs O(sequences scheduled): waiting sequences are looked at one by one from the head of a heap until one does
not fit, and a context's length matters only when its row starts.
"""

from __future__ import annotations

from collections.abc import Iterable

from msgspec.structs import replace

from engine.config import SchedulerConfig
from engine.core.wire import AddRequest, BeamParams, CoreStats, SequenceDelta
from engine.errors import EngineError, InvalidRequestError, QueueFullError
from engine.kv_cache.kv_cache import NO_GROWTH, Growth, KVCache, PrefixHit
from engine.request import FinishReason
from engine.scheduling.beam_group import BeamGroup
from engine.scheduling.beam_search import BeamSearch
from engine.scheduling.holdings import Holdings
from engine.scheduling.limits import check_servable
from engine.scheduling.sequence import Sequence, Status
from engine.scheduling.siblings import is_twin, own_blocks, start_of
from engine.scheduling.step_draft import StepDraft
from engine.scheduling.steps_in_flight import StepsInFlight
from engine.step import RowParams, ScheduledRow, StepPlan, StepResult, TokenLogprobs


class Scheduler:
    """Owns rows 0 .. max_num_seqs-1 and, through ``kv``, every KV block. Not thread-safe: one loop calls it."""

    def __init__(self, config: SchedulerConfig, kv: KVCache) -> None:
        self._config = config
        self._kv = kv
        self._held = Holdings(kv, config.max_num_seqs)
        self._live, self._waiting = self._held.live, self._held.waiting
        self._rows, self._running = self._held.rows, self._held.running
        self._ending: list[Sequence] = []
        """their last token was planned; what they hold is given back when the next step is planned"""
        self._steps = StepsInFlight()
        self._blocked: tuple[Sequence, int] | None = None
        """the head of the queue that did not fit, and the room there was"""
        self._arrivals = 0
        self._num_steps = 0
        self._prompt_tokens = 0
        self._generated_tokens = 0
        # Admission leaves 1 % of the pool to those that run, or they would push out at once what was just admitted.
        self._watermark = kv.pool.num_blocks // 100

    # -- requests ----------------------------------------------------------------------------------------------------

    def add(self, request: AddRequest) -> None:
        """Queue a request. `InvalidRequestError` if it can never be served, `QueueFullError` if too many wait."""
        max_total = min(len(request.prompt_token_ids) + request.max_tokens, self._config.max_model_len)
        for request_id in request.request_ids:
            if request_id in self._live:
                raise InvalidRequestError(f"request id {request_id!r} is in use by a live request", "request_id")
        check_servable(request, max_total, self._config, self._kv)
        if self.num_waiting >= self._config.max_waiting:
            raise QueueFullError(f"{self.num_waiting} requests wait already (--max-waiting {self._config.max_waiting})")
        if request.beams is not None:
            self._held.queue(self._open_beams(request, request.beams, max_total), [])
            return
        leader = self._open(request, request.request_id, request.params, max_total)
        others = [self._open(request, each.request_id, each.params, max_total) for each in request.followers]
        samples = [leader, *others]
        for seq in samples:
            seq.siblings = samples
        self._live.update(zip(request.request_ids, samples, strict=True))
        self._held.queue(leader, others)

    def _open(self, request: AddRequest, request_id: str, params: RowParams, max_total: int) -> Sequence:
        key = (request.priority if self._config.policy == "priority" else 0, self._arrivals)
        blocks = self._kv.open(request.cache_salt)
        seq = Sequence(request_id, params, list(request.prompt_token_ids), key, max_total, blocks)
        self._arrivals += 1
        return seq

    def _open_beams(self, request: AddRequest, beams: BeamParams, max_total: int) -> Sequence:
        new_tokens = max_total - len(request.prompt_token_ids)
        search = BeamSearch(beams, frozenset(request.params.stop_token_ids), new_tokens)
        params = replace(request.params, temperature=0.0, logprobs=search.num_candidates)
        members = [self._open(request, request.request_id, params, max_total) for _ in range(beams.width)]
        group = BeamGroup(request.request_ids, search, members)
        for member in members:
            member.siblings, member.group, member.status = members, group, Status.FOLLOWING
        self._live.update((request_id, members[0]) for request_id in request.request_ids)
        return members[0]

    def abort(self, request_ids: Iterable[str]) -> list[SequenceDelta]:
        """End requests in whatever state they are; ids that are not live are ignored. Tokens in flight will be
        dropped."""
        deltas = []
        for request_id in request_ids:
            seq = self._live.get(request_id)
            if seq is not None:
                self._held.end(seq)
                ended = [request_id] if seq.group is None else seq.group.request_ids
                deltas += [SequenceDelta(request_id=each, finish_reason="abort") for each in ended]
        return deltas

    # -- planning ----------------------------------------------------------------------------------------------------

    def plan(self) -> StepPlan | None:
        """The next step, or None when nothing can be computed before results arrive (or at all)."""
        self._retire_ending()
        draft = StepDraft(self._config.max_num_batched_tokens)
        if not self._schedule_running(draft):
            self._admit_waiting(draft)
        rows = draft.rows
        if not rows:
            return None
        plan = draft.plan(self._num_steps, self._rows.take_released())
        self._steps.push(self._num_steps, rows)
        self._num_steps += 1
        return plan

    def _retire_ending(self) -> None:
        """A sequence whose last token is in flight needs its row and blocks no more: later steps come later on the
        device."""
        for seq in self._ending:
            if seq.status is Status.RUNNING:
                self._held.leave_device(seq)
                seq.status = Status.ENDING
        self._ending.clear()

    def _schedule_running(self, draft: StepDraft) -> bool:
        """Shares of the budget for running sequences, decodes before prefills; returns whether any was preempted."""
        preempted = False
        for decoding in (True, False):
            if not decoding and draft.tentative:
                self._spare_those_who_decode(draft)
            index = 0
            while index < len(self._running) and draft.budget > 0:
                seq = self._running[index]
                index += 1
                remaining = seq.remaining
                if (remaining == 1) is not decoding or seq.waits:
                    continue
                query_len = min(remaining, draft.budget)
                while (growth := self._kv.append(seq.blocks, seq.computed + query_len)) is None:
                    # The last to be preempted is the sequence itself, so this ends.
                    victims = self._held.preempt_latest()
                    for victim in victims:
                        draft.give_back(victim)
                    preempted = True
                    if seq in victims:
                        break
                else:
                    draft.take(seq, query_len, growth)
        for seq, (query_len, growth) in draft.tentative.items():
            self._place(draft, seq, query_len, growth)
        return preempted

    def _spare_those_who_decode(self, draft: StepDraft) -> None:
        """They wait for the whole step, so prompts get less of it."""
        if self._config.max_mixed_prefill_tokens is not None:
            draft.budget = min(draft.budget, self._config.max_mixed_prefill_tokens)

    def _admit_waiting(self, draft: StepDraft) -> None:
        """Start waiting sequences, in order, until the budget, the rows or the pool does not allow the next one."""
        while draft.budget > 0 and self._rows.num_free:
            seq = self._waiting.first()
            # A preempted sequence whose token is in flight does not know all of its tokens yet.
            if seq is None or seq.in_flight or any(follower.in_flight for follower in seq.followers):
                return
            if seq.group is not None and self._rows.num_free < len(seq.group.members):
                return
            if (hit := self._find_room(seq)) is None:
                return
            self._waiting.pop()
            self._start(draft, seq, hit)

    def _find_room(self, seq: Sequence) -> PrefixHit | None:
        """What the prefix cache has for the sequence if all known tokens of it and of its followers fit now beside
        those that run, else None. Where nothing runs, those followers wait by themselves that do not fit.

        All tokens, though only a chunk is taken: a prefill that runs out of blocks half-way is work for nothing. No
        other prefill is half-way here, for it would have taken the whole budget.
        """
        room = self._kv.pool.num_free
        if self._running:
            room -= self._watermark
            # Looking up a long prompt costs its length: do it again only when there is more room than last time.
            if self._blocked is not None and self._blocked[0] is seq and room <= self._blocked[1]:
                return None
        hit = self._kv.match_prefix(seq.blocks, seq.tokens, seq.prefix_limit)
        need = self._kv.blocks_for(len(seq.tokens)) - self._kv.blocks_for(hit.num_tokens) + hit.num_free
        rows = self._rows.num_free - 1
        need += sum(own_blocks(follower, seq, self._kv) for follower in seq.followers[:rows])
        while need > room and seq.followers and not self._running:
            follower = seq.followers.pop()
            if len(seq.followers) < rows:
                need -= own_blocks(follower, seq, self._kv)
            self._held.unfollow(follower)
        if need > room:
            self._blocked = (seq, room)
            return None
        self._blocked = None
        return hit

    def _start(self, draft: StepDraft, seq: Sequence, hit: PrefixHit) -> None:
        self._kv.adopt(seq.blocks, hit)
        if seq.cached_tokens is None:
            seq.cached_tokens = hit.num_tokens
            self._prompt_tokens += seq.prompt_len
        self._rows.enter(seq)
        if seq.group is not None:
            self._rows.reserve(seq.group)
        seq.computed = hit.num_tokens
        query_len = min(seq.remaining, draft.budget)
        if self._kv.append(seq.blocks, seq.computed + query_len) is None:
            raise EngineError(f"request {seq.request_id!r} was admitted but its KV blocks are gone")
        draft.budget -= query_len
        draft.start_row(seq)
        self._place(draft, seq, query_len, NO_GROWTH)

    def _place(self, draft: StepDraft, seq: Sequence, query_len: int, growth: Growth) -> None:
        """The sequence is in the step for good: from here on its KV counts as computed, and may be shared."""
        twins = any(is_twin(follower, seq) for follower in seq.followers)
        samples = draft.place(seq, query_len, growth, may_fork=bool(twins and self._rows.num_free))
        seq.computed += query_len
        if samples:
            seq.in_flight += 1
            if seq.certain_to_end and seq.group is None:
                self._ending.append(seq)
        self._kv.register(seq.blocks, seq.tokens)
        if seq.followers:
            self._fork_followers(draft, seq, samples)

    def _fork_followers(self, draft: StepDraft, seq: Sequence, samples: bool) -> None:
        """Those whose common tokens are computed now share their blocks, and a twin the logits, too, each on a row of
        its own; those for which there is no row wait for one like anybody."""
        for follower in seq.followers.copy():
            twin, start = is_twin(follower, seq), start_of(follower, seq, self._kv.block_size)
            if seq.computed < start or (twin and not samples):
                continue
            seq.followers.remove(follower)
            if not self._rows.num_free and seq.group is None:
                self._held.unfollow(follower)
                continue
            self._held.following -= 1
            follower.leader = None
            follower.blocks = self._kv.fork(seq.blocks, None if twin else start)
            if follower.cached_tokens is None:
                follower.cached_tokens = seq.cached_tokens
            follower.computed = start
            self._rows.enter(follower)
            if not twin:
                draft.start_row(follower)
                continue
            draft.fork(follower)
            follower.in_flight = 1
            if follower.certain_to_end:
                self._ending.append(follower)

    # -- results -----------------------------------------------------------------------------------------------------

    def complete(self, result: StepResult) -> list[SequenceDelta]:
        """What the oldest step in flight brought: tokens, ends, faults. Results arrive in the order of plans."""
        tokens = iter(result.token_ids)
        deltas = []
        for seq, row in self._steps.pop(result):
            token = None
            if row.samples:
                seq.in_flight -= 1
                token = next(tokens)
            if seq.status is Status.FINISHED:
                continue
            if row.row in result.faults:
                deltas += self._fault(seq, row)
            elif seq.group is not None:
                deltas += self._choose(seq, seq.group, result.logprobs[row.row]) if row.samples else []
            else:
                delta = self._advance(seq, row, token, result)
                if delta is not None:
                    deltas.append(delta)
        return deltas

    def _fault(self, seq: Sequence, row: ScheduledRow) -> list[SequenceDelta]:
        """Its KV is not to be trusted: the next request with this prefix computes it itself."""
        self._kv.forget(seq.blocks)
        self._held.end(seq)
        delta = SequenceDelta(
            request_id=seq.request_id,
            cached_tokens=seq.newly_cached,
            finish_reason="error",
            error=f"the logits at position {row.computed + row.query_len - 1} held NaN, or no token was allowed",
            error_kind="fault",
        )
        return [delta] if seq.group is None else [replace(delta, request_id=each) for each in seq.group.request_ids]

    def _choose(self, beam: Sequence, group: BeamGroup, found: TokenLogprobs) -> list[SequenceDelta]:
        """A beam's candidates are here; with those of all beams it is decided how each goes on, or that the search is
        over."""
        if beam.status is not Status.RUNNING or not group.bring(beam, found):
            return []
        choices = group.choose()
        if choices is not None:
            self._rows.settle(group, group.follow(choices, self._kv))
            return []
        deltas = group.results(group.members[0].cached_tokens or 0)
        self._generated_tokens += sum(len(delta.token_ids) for delta in deltas)
        self._held.end(beam)
        return deltas

    def _advance(self, seq: Sequence, row: ScheduledRow, token: int | None, result: StepResult) -> SequenceDelta | None:
        cached_tokens = seq.newly_cached
        prompt_logprobs: list[TokenLogprobs] = []
        if row.row in result.prompt_logprobs:
            prompt_logprobs = seq.undelivered(row.computed, result.prompt_logprobs[row.row])
        if token is None and not prompt_logprobs:
            return None
        finish_reason, stopped = self._append_token(seq, token) if token is not None else (None, False)
        logprobs = result.logprobs.get(row.row) if token is not None else None
        return SequenceDelta(
            request_id=seq.request_id,
            token_ids=[token] if token is not None else [],
            logprobs=[logprobs] if logprobs is not None else [],
            prompt_logprobs=prompt_logprobs,
            finish_reason=finish_reason,
            stop_token_id=token if stopped else None,
            cached_tokens=cached_tokens,
        )

    def _append_token(self, seq: Sequence, token: int) -> tuple[FinishReason | None, bool]:
        """Returns why the sequence ended, if it did, and whether this token ended it."""
        stopped = seq.ends_with(token)
        seq.tokens.append(token)
        self._generated_tokens += 1
        # A block that a planned step fills with this token is findable from now on, even if the sequence ends here.
        self._kv.register(seq.blocks, seq.tokens)
        if not stopped and len(seq.tokens) < seq.max_total:
            return None, False
        self._held.end(seq)
        return ("stop" if stopped else "length"), stopped

    # -- state -------------------------------------------------------------------------------------------------------

    @property
    def has_work(self) -> bool:
        """A sequence is unfinished, or a step is unanswered."""
        return bool(self._live or self._steps)

    @property
    def num_waiting(self) -> int:
        return self._held.num_waiting

    def reset_prefix_cache(self) -> int:
        """Forget every cached block that no sequence uses; returns their number."""
        return self._kv.reset_prefix_cache()

    def stats(self) -> CoreStats:
        """All but ``compiles_after_ready``, which the executor knows."""
        kv = self._kv.stats()
        return CoreStats(
            running=len(self._running),
            waiting=self.num_waiting,
            kv_blocks_total=kv.total,
            kv_blocks_used=kv.used,
            steps=self._num_steps,
            preemptions=self._held.preemptions,
            prefix_query_tokens=kv.query_tokens,
            prefix_hit_tokens=kv.hit_tokens,
            prompt_tokens=self._prompt_tokens,
            generated_tokens=self._generated_tokens,
        )
