"""Placing a sequence into a step for good: from then on its KV counts as computed, and others may share it."""

from __future__ import annotations

from engine.kv_cache.sequence_blocks import NO_GROWTH, Growth
from engine.scheduling.holdings import Holdings
from engine.scheduling.sequence import Sequence
from engine.scheduling.siblings import is_twin, start_of
from engine.scheduling.step_draft import StepDraft
from engine.step import ScheduledRow


class Placement:
    def __init__(self, held: Holdings) -> None:
        self._held = held
        self._kv, self._rows = held.kv, held.rows

    def place(self, draft: StepDraft, seq: Sequence, query_len: int, growth: Growth) -> None:
        """The sequence is in the step for good: from here on its KV counts as computed, and may be shared."""
        rows, followers = self._rows, seq.followers
        may_fork = bool(followers and rows.free) and any(is_twin(each, seq) for each in followers)
        draft.tell(seq, growth)
        computed, unsure = int(rows.computed[seq.row]), int(rows.unsure[seq.row])
        samples = rows.advance(seq, query_len)
        draft.add(seq, ScheduledRow(seq.row, computed, query_len, samples, unsure), may_fork)
        if growth is not NO_GROWTH or query_len > 1 or self._kv.states.groups:
            self._held.make_findable(seq)
        if seq.pin is not None:
            self._held.pins.keep(seq.pin, seq.blocks, seq.prompt_len, computed + query_len)
        if seq.hands_over:
            self._held.leases.keep(seq.request_id, seq.blocks, seq.prompt_len, computed + query_len)
        if followers:
            self._fork_followers(draft, seq, computed + query_len, samples)
        rows.watch(seq)

    def _fork_followers(self, draft: StepDraft, seq: Sequence, computed: int, samples: int) -> None:
        """Those whose common tokens are computed now share their blocks, and a twin the logits, too, each on a row of
        its own; those for which there is no row wait for one like anybody."""
        rows = self._rows
        for follower in seq.followers.copy():
            twin, start = is_twin(follower, seq), start_of(follower, seq, self._kv.block_size)
            if computed < start or (twin and not samples):
                continue
            if not rows.free and seq.group is None:
                seq.followers.remove(follower)
                self._held.unfollow(follower)
                continue
            blocks = self._kv.fork(seq.blocks, None if twin else start)
            seq.followers.remove(follower)
            self._held.following -= 1
            follower.leader, follower.blocks = None, blocks
            if follower.cached_tokens is None:
                follower.cached_tokens, follower.started_at = seq.cached_tokens, seq.started_at
            rows.enter(follower, start)
            draft.start_row(follower)
            if twin:
                rows.advance(follower, 0)
                draft.add(follower, ScheduledRow(follower.row, start, 0, samples=1), may_fork=True)
            rows.watch(follower)
