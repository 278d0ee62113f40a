"""One sequence from arrival to end. What is true of it while it runs, and changes with every step, is in the columns of
`RunningRows`; here is what never changes, and what is left when it does not run."""

from __future__ import annotations

import enum
from typing import TYPE_CHECKING

from engine.kv_cache.kv_cache import NO_GROWTH, SequenceBlocks
from engine.step import RowParams, TokenLogprobs

if TYPE_CHECKING:
    from engine.grammars.interface import Matcher
    from engine.scheduling.beam_group import BeamGroup


class Status(enum.Enum):
    PREPARING = enum.auto()
    """its grammar compiles; it holds nothing"""
    FOLLOWING = enum.auto()
    """holds nothing; another sample of its request computes what they have in common, and it is forked from that one
    then"""
    WAITING = enum.auto()
    """in the queue, holds nothing but maybe blocks on the host (new, or preempted)"""
    RUNNING = enum.auto()
    """holds a row and blocks"""
    FINISHED = enum.auto()


class Sequence:
    """Only the scheduler changes it."""

    __slots__ = (
        "blocks",
        "cached_tokens",
        "common",
        "drafts",
        "followers",
        "group",
        "in_flight",
        "key",
        "leader",
        "matcher",
        "max_blocks",
        "max_total",
        "moved",
        "new_row",
        "next_prompt_logprob",
        "params",
        "pin",
        "prompt_len",
        "request_id",
        "rewrite_from",
        "row",
        "siblings",
        "status",
        "stop_token_ids",
        "tokens",
    )

    def __init__(
        self,
        request_id: str,
        params: RowParams,
        tokens: list[int],
        key: tuple[int, int],
        max_total: int,
        blocks: SequenceBlocks,
    ) -> None:
        """`tokens`: the prompt, this sequence's own."""
        self.request_id = request_id
        self.params = params
        self.key = key
        """(priority, arrival): lower runs earlier and is preempted later; unique"""
        self.max_total = max_total
        """tokens at which it ends with "length" """
        self.blocks = blocks
        self.matcher: Matcher | None = None
        """how far what has arrived has come in the request's grammar"""
        self.drafts: list[int] = []
        """what may come behind `tokens`, as the device holds it; while drafts are computed, those"""
        self.max_blocks = 0
        """what its request may hold at once, by itself"""
        self.pin: str | None = None
        """what its prompt is to be kept as"""
        self.tokens = tokens
        """those that have arrived"""
        self.prompt_len = len(self.tokens)
        self.stop_token_ids = frozenset(params.stop_token_ids)
        self.status = Status.WAITING
        self.row = -1
        """-1: it does not run"""
        self.in_flight = 0
        """of a sequence that does not run: tokens that planned steps sample and that have not arrived"""
        self.cached_tokens: int | None = None
        """prompt tokens found in the cache at the first start; None before it"""
        self.siblings: list[Sequence] = [self]
        """the live samples of its request, in order; one list for all of them"""
        self.leader: Sequence | None = None
        """while it is FOLLOWING"""
        self.common = 0
        """while it is FOLLOWING: tokens that it has in common with its leader, as far as both were known"""
        self.followers: list[Sequence] = []
        """they are forked from this one, each as soon as what they have in common is computed"""
        self.group: BeamGroup | None = None
        """the search whose beams it may carry"""
        self.new_row = False
        """the device knows nothing of its row yet"""
        self.rewrite_from: int | None = None
        """a choice was made among beams: the device holds other tokens from here on; the last one is to be computed"""
        self.moved = NO_GROWTH
        """what the device was not told of its block table (beams)"""
        self.next_prompt_logprob = 1
        """first prompt position whose log-probability has not been delivered (position 0 has none)"""

    @property
    def newly_cached(self) -> int:
        """Prompt tokens from the cache, as long as nothing of this sequence has been delivered."""
        first = len(self.tokens) == self.prompt_len and self.next_prompt_logprob == 1
        return (self.cached_tokens or 0) if first else 0

    @property
    def prefix_limit(self) -> int:
        """Tokens that may come from the prefix cache: all but the last, and nothing that prompt log-probabilities
        still need (the query at p scores the token at p+1)."""
        limit = len(self.tokens) - 1
        if self.params.prompt_logprobs is not None and self.next_prompt_logprob < self.prompt_len:
            limit = min(limit, self.next_prompt_logprob - 1)
        return limit

    def undelivered(self, computed: int, entries: list[TokenLogprobs]) -> list[TokenLogprobs]:
        """Of a chunk's prompt log-probabilities (positions computed+1 …), those not delivered before a preemption."""
        fresh = entries[max(self.next_prompt_logprob - (computed + 1), 0) :]
        self.next_prompt_logprob += len(fresh)
        return fresh

    def ends_with(self, token: int) -> bool:
        """Whether ``token``, not appended yet, is a stop token that counts already."""
        generated = len(self.tokens) - self.prompt_len
        return token in self.stop_token_ids and generated >= self.params.min_tokens
