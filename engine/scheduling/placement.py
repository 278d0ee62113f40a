"""Putting a sequence into a step for good: from then on its KV counts as computed, and others may share it."""

from __future__ import annotations

from engine.kv_cache.kv_cache import NO_GROWTH, Growth
from engine.scheduling.holdings import Holdings
from engine.scheduling.sequence import Sequence, Status
from engine.scheduling.siblings import is_twin, start_of
from engine.scheduling.step_draft import StepDraft


class Placement:
    def __init__(self, held: Holdings, fewest_steady: int) -> None:
        """`fewest_steady`: sequences that must run for those that decode to become steady."""
        self._held = held
        self._kv, self._rows = held.kv, held.rows
        self._fewest_steady = fewest_steady
        self._ending: list[Sequence] = []
        """their last token was planned; what they hold is given back when the next step is planned"""

    def place(self, draft: StepDraft, seq: Sequence, query_len: int, growth: Growth) -> None:
        """The sequence is in the step for good: from here on its KV counts as computed, and may be shared."""
        followers = seq.followers
        may_fork = bool(followers and self._rows.num_free) and any(is_twin(each, seq) for each in followers)
        samples = draft.place(seq, query_len, growth, may_fork)
        if growth is not NO_GROWTH or query_len > 1:
            self._held.make_findable(seq)
        if seq.group is None:
            if samples and seq.certain_to_end:
                self._ending.append(seq)
            elif samples and self._may_be_steady(seq):
                self._rows.steady.enter(seq)
            if seq.pin is not None:
                self._held.pins.keep(seq)
        if followers:
            self._fork_followers(draft, seq, samples)

    def _may_be_steady(self, seq: Sequence) -> bool:
        many = len(self._rows.sequences) >= self._fewest_steady
        return many and not seq.followers and seq.params.logprobs is None

    def _fork_followers(self, draft: StepDraft, seq: Sequence, samples: bool) -> None:
        """Those whose common tokens are computed now share their blocks, and a twin the logits, too, each on a row of
        its own; those for which there is no row wait for one like anybody."""
        for follower in seq.followers.copy():
            twin, start = is_twin(follower, seq), start_of(follower, seq, self._kv.block_size)
            if seq.computed < start or (twin and not samples):
                continue
            if not self._rows.num_free and seq.group is None:
                seq.followers.remove(follower)
                self._held.unfollow(follower)
                continue
            blocks = self._kv.fork(seq.blocks, None if twin else start)
            seq.followers.remove(follower)
            self._held.following -= 1
            follower.leader, follower.blocks = None, blocks
            if follower.cached_tokens is None:
                follower.cached_tokens = seq.cached_tokens
            follower.computed = start
            self._rows.enter(follower)
            if not twin:
                draft.start_row(follower)
                continue
            draft.fork(follower)
            follower.sampled()
            if follower.certain_to_end:
                self._ending.append(follower)

    def retire_ending(self) -> None:
        """A sequence whose last token is in flight needs its row and blocks no more: later steps come later on the
        device."""
        for seq in self._ending:
            if seq.status is Status.RUNNING:
                self._held.leave_device(seq)
                seq.status = Status.ENDING
        self._ending.clear()
