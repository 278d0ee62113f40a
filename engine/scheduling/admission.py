"""Who starts, or goes on behind a preemption: waiting sequences in order, one by one from the head of the queue until
one does not fit. Nobody is preempted for them.

Of the first few that are new, who finds most in the prefix cache starts before the others, while it is there: where
more prefixes are in use than fit, requests with the same one come together (longest prefix match: Zheng et al.,
"SGLang", 2024; in a fair order: Cao et al., "Locality-aware Fair Scheduling", 2025). Nobody is passed for long.
"""

from __future__ import annotations

from engine.config import SchedulerConfig
from engine.errors import EngineError, QueueFullError
from engine.kv_cache.prefix import PrefixHit
from engine.kv_cache.sequence_blocks import NO_GROWTH
from engine.kv_cache.swapping import blocks_to_go_on
from engine.scheduling.crowds import Crowds
from engine.scheduling.expected import Expected
from engine.scheduling.holdings import Holdings, Urgency, urgency
from engine.scheduling.placement import Placement
from engine.scheduling.prompt_shares import LEAST, prompt_shares
from engine.scheduling.sequence import Sequence
from engine.scheduling.siblings import forks_of, own_blocks, prefix_limit
from engine.scheduling.step_draft import StepDraft

LOOKED_AT, LOOKED_BLOCKS = 64, 256
"""sequences that are looked at before one of them starts; blocks of a prompt that tell them apart"""
MOST_PASSED = 32
"""times that one is passed by others that came later"""


class Admission:
    def __init__(
        self, config: SchedulerConfig, held: Holdings, placement: Placement, expected: Expected, crowds: Crowds
    ) -> None:
        self._config, self._held, self._placement, self._expected = config, held, placement, expected
        self._crowds = crowds
        self._kv, self._rows = held.kv, held.rows
        self._waiting, self._running = held.waiting, held.running
        self._blocked: tuple[Sequence, int] | None = None
        """the head of the queue that did not fit, and the room there was"""
        self.prompt_tokens = 0
        """of all that have started"""

    def shares(self, draft: StepDraft, prefilling: list[Sequence]) -> list[int]:
        """Tokens for each of those that are half-way with their prompts, the most urgent first."""
        needs = [(urgency(seq), self._rows.remaining(seq)) for seq in prefilling]
        if self._held.fair is not None:
            self._hold_crowds(draft, prefilling, needs)
        if not prefilling or draft.budget <= 0:
            return [0] * len(prefilling)
        budget = max(self._for_prompts(draft.budget, prefilling[0]) - int(self._rows.drafts.sum()), 1)
        return prompt_shares(needs, budget, self._config.min_shared_chunk)

    def _hold_crowds(self, draft: StepDraft, prefilling: list[Sequence], needs: list[tuple[Urgency, int]]) -> None:
        """What crowds need of this step becomes what they may have of it, also those that start behind the first that
        waits."""
        crowds, first = self._crowds, self.next()
        parts = [(urgent, tokens, crowds.has(seq)) for seq, (urgent, tokens) in zip(prefilling, needs, strict=True)]
        members = [index for index, (_, _, is_member) in enumerate(parts) if is_member]
        if first is not None:
            waits = crowds.has(first) or self._is_blocked(first)
            need = 0 if waits else self._need(first, draft.budget) or 0
            parts.append((urgency(first), need, crowds.has(first)))
        urgent = min((each[0] for each in parts if each[2]), default=None)
        ahead = [each for each in parts if not each[2] and (urgent is None or each[0] <= urgent)]
        others = sum(tokens for _, tokens, _ in ahead)
        crowds.hold(bool(draft.tentative or len(draft.plain)), others)
        if members:
            most, lead = crowds.left, prefilling[members[0]]
            if first is not None and crowds.has(first):
                most = self._for_prompts(most, lead, smallest=most // 2)
            shares = prompt_shares([needs[index] for index in members], most, most // 2)
            for index, share in zip(members, shares, strict=True):
                needs[index] = needs[index][0], crowds.take(prefilling[index], share)

    def who_starts(self) -> Sequence | None:
        """The first that waits, unless it is known that it does not fit."""
        first = self.next()
        return None if first is None or self._is_blocked(first) else first

    def admit(self, draft: StepDraft) -> None:
        """Start waiting sequences, in order, until the budget, the rows or the pool does not allow the next one."""
        self._start_all(draft)
        first = self._waiting.first()
        if first is not None and (len(self._rows.free) < self._rows_to_go_on(first) or self._is_blocked(first)):
            self._expected.no_more_fit()
        else:
            self._expected.more_fit()

    def _start_all(self, draft: StepDraft) -> None:
        while draft.budget > 0 and (seq := self.next()) is not None:
            if not self._crowds.allowed(seq, 1) and not seq.blocks.on_host:
                return
            best, passed = self._in_turn(seq)
            went_on = self._go_on(draft, best)
            if went_on:
                for each in passed:
                    each.passed += 1
            elif went_on is False and best is not seq:
                went_on = self._go_on(draft, seq)
            if not went_on and (self._running or not self._held.leases.give_way()):
                return

    def _go_on(self, draft: StepDraft, seq: Sequence) -> bool | None:
        """None: it failed, and nobody behind it starts in this step: it may hold anything."""
        with self._held.failures.isolate(seq):
            return self._swap_in(draft, seq) if seq.blocks.on_host else self._start_if_room(draft, seq)
        return None

    def _in_turn(self, first: Sequence) -> tuple[Sequence, list[Sequence]]:
        """Who finds more in the prefix cache than the first that waits, if that is new and others are, too, and those
        whom it would pass; else the first."""
        looks = len(self._waiting) > 1 and self._kv.pool.enable_prefix_caching
        if not looks or not _is_new(first) or self._is_blocked(first):
            return first, []
        ahead, best, most = self._waiting.ahead(LOOKED_AT), 0, 0
        for index, seq in enumerate(ahead):
            try:
                more = self._cached_beyond(seq, most)
            except Exception as error:
                self._held.failures.note(seq, error)
                return first, []
            if more and not self._expected.would_be_late(seq):
                best, most = index, most + more
            if seq.passed >= MOST_PASSED or seq.cached_tokens is not None:
                break
        return (ahead[best], ahead[:best]) if best and self._is_found(ahead[best]) else (first, [])

    def _cached_beyond(self, seq: Sequence, begin: int) -> int:
        """Of its blocks from `begin` on, those that the prefix cache has; what comes before is not looked up."""
        if not _is_new(seq):
            return 0
        end = min(prefix_limit(seq, self._kv) // self._kv.block_size, LOOKED_BLOCKS)
        return self._kv.cached_blocks(seq.blocks, seq.tokens, begin, end)

    def _is_found(self, seq: Sequence) -> bool:
        """By all layers."""
        if not self._kv.slides:
            return True
        with self._held.failures.isolate(seq):
            return self._kv.match_prefix(seq.blocks, seq.tokens, prefix_limit(seq, self._kv)).num_tokens > 0
        return False

    def late(self) -> tuple[Sequence, QueueFullError] | None:
        """The first that waits, where it could not be served in time any more: it is to end, holding nothing yet."""
        seq = self._waiting.first()
        error = None if seq is None else self._expected.is_late(seq)
        return None if seq is None or error is None else (seq, error)

    def make_way(self) -> None:
        """Where the policy is fair: a tenant that waits, and runs less for its weight than another one will without its
        last sequence, and was given less, does not wait until that one ends. Who is preempted comes back behind it."""
        seq = self._waiting.first() if self._held.fair is not None else None
        while seq is not None and self._running and self._lacks_room(seq):
            last = self._held.last_of_most(seq.key[0])
            if last is None or seq.account is None or last.account is None:
                return
            own, other, fewer = seq.account, last.account, len(self._held.with_siblings(last))
            wanted = (own.rows + _rows_of(seq)) / own.weight
            if other.order <= own.order or (other.rows - fewer) / other.weight < wanted:
                return
            self._held.preempt(last, {})
            seq = self._waiting.first()

    def _lacks_room(self, seq: Sequence) -> bool:
        """It would start, but for those that run."""
        if seq.in_flight or any(follower.in_flight for follower in seq.followers):
            return False
        if len(self._rows.free) < self._rows_to_go_on(seq):
            return True
        if seq.blocks.on_host:
            return self._is_blocked(seq)
        with self._held.failures.isolate(seq):
            return self._find_room(seq, self._config.max_num_batched_tokens, self._held.growth) is None
        return False  # nobody is preempted for one that fails

    def _need(self, seq: Sequence, budget: int) -> int | None:
        """Tokens that it would compute if it started beside those that run; None: it does not fit, or that failed."""
        if seq.blocks.on_host:
            return 1
        with self._held.failures.isolate(seq):
            hit = self._find_room(seq, budget)
            return None if hit is None else len(seq.tokens) - hit.num_tokens
        return None

    def _for_prompts(self, budget: int, seq: Sequence, smallest: int | None = None) -> int:
        """What is left of a step, but for what those that start in it will take: nearly all that they need if they
        are more urgent, of its other half if they are as urgent, and no less than is shared (`smallest`)."""
        first = self.next()
        if first is None or urgency(first) > urgency(seq) or self._is_blocked(first):
            return budget
        need = self._need(first, budget)
        if need is None:
            return budget
        if urgency(first) < urgency(seq):
            return max(budget - self._crowds.allowed(first, need), budget // LEAST, 1)
        taken = min(budget // 2, self._crowds.allowed(first, self.waiting_tokens))
        return max(budget - taken, min(budget, self._config.min_shared_chunk if smallest is None else smallest))

    @property
    def waiting_tokens(self) -> int:
        """If all are like the first one."""
        first = self.next()
        return 0 if first is None else len(first.tokens) * len(self._waiting)

    def next(self) -> Sequence | None:
        """The first that waits, if it could start now as far as rows go."""
        seq, num_free = self._waiting.first(), len(self._rows.free)
        # A preempted sequence whose token is in flight does not know all of its tokens yet.
        if seq is None or not num_free or seq.in_flight or any(follower.in_flight for follower in seq.followers):
            return None
        return seq if num_free >= self._rows_to_go_on(seq) else None

    def _rows_to_go_on(self, seq: Sequence) -> int:
        """Those of its followers that left the device with it come back with it, unless nothing else runs."""
        swapped = sum(follower.blocks.on_host for follower in seq.followers) if seq.blocks.on_host else 0
        return _rows_of(seq) + (swapped if self._running else 0)

    def _is_blocked(self, seq: Sequence, room: int | None = None) -> bool:
        """It did not fit, and there is not more room than then. Looking up a long prompt costs its length."""
        if not self._running or self._blocked is None or self._blocked[0] is not seq:
            return False
        return (self._held.room if room is None else room) <= self._blocked[1]

    def _start_if_room(self, draft: StepDraft, seq: Sequence) -> bool:
        hit = self._find_room(seq, draft.budget)
        if hit is not None:
            self._start(draft, seq, hit)
        return hit is not None

    def _find_room(self, seq: Sequence, budget: int, kept: int = 0) -> PrefixHit | None:
        """What the prefix cache has for the sequence if all known tokens of it and of its followers fit now beside
        those that run, and `kept` blocks, else None. Where nothing runs, those followers wait by themselves that do not
        fit; beams always fit then (`check_servable`).

        All tokens, though only a chunk is taken: a prefill that runs out of blocks half-way is work for nothing.
        """
        room = self._held.room - kept
        if self._is_blocked(seq, room) or (self._config.whole_prompts and len(seq.tokens) > budget):
            return None
        hit = self._kv.match_prefix(seq.blocks, seq.tokens, prefix_limit(seq, self._kv))
        need = self._to_start(seq, hit)
        while need > room and seq.followers and seq.group is None and not self._running:
            self._held.unfollow(seq.followers.pop())
            need = self._to_start(seq, hit)
        if need > room:
            self._blocked = (seq, room)
            return None
        self._blocked = None
        return hit

    def _to_start(self, seq: Sequence, hit: PrefixHit) -> int:
        """Blocks, with its followers for whom there are rows."""
        followers = seq.followers[: len(self._rows.free) - 1]
        forks = forks_of(seq, self._kv) if self._kv.states.groups else ()
        need = self._kv.blocks_to_start(hit, len(seq.tokens), len(forks))
        return need + sum(own_blocks(follower, seq, self._kv) for follower in followers)

    def _swap_in(self, draft: StepDraft, seq: Sequence) -> bool:
        """A sequence whose blocks are on the host goes on, with those of its followers whose blocks are; False: not
        before there is room. Where nothing runs there will not be more: those followers wait by themselves that do not
        fit, and what cannot be split gives up its host blocks to be computed again."""
        room = self._held.room
        if self._is_blocked(seq, room):
            return False
        members = [seq, *(follower for follower in seq.followers if follower.blocks.on_host)]
        while (need := self._to_go_on(members)) > room or len(members) > len(self._rows.free):
            if self._running:
                self._blocked = (seq, room)
                return False
            if seq.group is not None or len(members) == 1:
                for member in members:
                    self._kv.free(member.blocks)
                return True
            follower = members.pop()
            seq.followers.remove(follower)
            self._held.unfollow(follower)
        assert need <= room
        self._blocked = None
        self._held.swap_in(members)
        for member in members:
            query_len = min(self._rows.remaining(member), draft.budget)
            if query_len == 0:
                break
            growth = self._held.append(member, query_len)
            if growth is None:
                raise EngineError(f"request {member.request_id!r} was swapped in but has no room to go on")
            draft.budget -= query_len
            self._placement.place(draft, member, query_len, growth)
        return True

    def _to_go_on(self, members: list[Sequence]) -> int:
        assert self._kv.host is not None
        return blocks_to_go_on(self._kv, self._kv.host, [(member.blocks, len(member.tokens)) for member in members])

    def _start(self, draft: StepDraft, seq: Sequence, hit: PrefixHit) -> None:
        self._kv.adopt(seq.blocks, hit)
        self._kv.states.wanted(seq.blocks, seq.prompt_len, forks_of(seq, self._kv))
        self._held.let_go_of_landed(seq)
        self._waiting.take(seq)
        if seq.cached_tokens is None:
            seq.cached_tokens = hit.num_tokens
            self.prompt_tokens += seq.prompt_len
            self._expected.started(seq)
            self._held.began(seq)
            if self._held.fair is not None:
                self._held.fair.started(seq, len(seq.tokens) - hit.num_tokens)
        self._rows.enter(seq, hit.num_tokens)
        if seq.group is not None:
            self._rows.reserve(seq.group)
        query_len = self._rows.remaining(seq)
        if not self._config.whole_prompts:
            most = self._for_prompts(draft.budget, seq)
            whole = query_len - most < self._config.min_shared_chunk // 4  # no step more for a few tokens
            query_len = self._crowds.take(seq, min(query_len, draft.budget if whole else most))
        if self._held.append(seq, query_len) is None:
            raise EngineError(f"request {seq.request_id!r} was admitted but its KV blocks are gone")
        draft.budget -= query_len
        draft.start_row(seq)
        self._held.make_findable(seq)
        self._placement.place(draft, seq, query_len, NO_GROWTH)


def _is_new(seq: Sequence) -> bool:
    """It never ran, and needs no row but one of its own to start."""
    follows = any(follower.in_flight for follower in seq.followers)
    return seq.cached_tokens is None and seq.group is None and not seq.blocks.on_host and not follows


def _rows_of(seq: Sequence) -> int:
    """That it needs to start."""
    return 1 if seq.group is None else len(seq.group.members)
