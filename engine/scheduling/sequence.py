"""One sequence from arrival to end. What is true of it while it runs, and changes with every step, is in the columns of
`RunningRows`; here is what never changes, and what is left when it does not run."""

from __future__ import annotations

import enum
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from engine.kv_cache.sequence_blocks import NO_GROWTH, Growth, SequenceBlocks
from engine.step import RowParams, TokenLogprobs

if TYPE_CHECKING:
    from engine.adapters.request import LoRARequest
    from engine.grammars.interface import Matcher
    from engine.scheduling.accounts import Account
    from engine.scheduling.beam_group import BeamGroup


class Status(enum.Enum):
    PREPARING = enum.auto()
    """its grammar compiles, or its adapter is not there; it holds nothing"""
    FETCHING = enum.auto()
    """what another engine has computed of its prompt is on its way; it holds nothing"""
    FOLLOWING = enum.auto()
    """holds nothing; another sample of its request computes what they have in common, and it is forked from that one
    then"""
    WAITING = enum.auto()
    """in the queue, holds nothing but maybe blocks on the host (new, or preempted)"""
    RUNNING = enum.auto()
    """holds a row and blocks"""
    FINISHED = enum.auto()


@dataclass(slots=True, eq=False)
class Sequence:
    """Only the scheduler changes it."""

    request_id: str
    params: RowParams
    tokens: list[int]
    """those that have arrived; at first the prompt, this sequence's own"""
    key: tuple[int, int]
    """(priority, arrival): lower runs earlier and is preempted later; unique"""
    max_total: int
    """tokens at which it ends with "length" """
    blocks: SequenceBlocks
    prompt_len: int = field(init=False)
    stop_token_ids: frozenset[int] = field(init=False)
    siblings: list[Sequence] = field(init=False)
    """the live samples of its request, in order; one list for all of them"""
    status: Status = Status.WAITING
    row: int = -1
    """-1: it does not run"""
    in_flight: int = 0
    """of a sequence that does not run: tokens that planned steps sample and that have not arrived"""
    cached_tokens: int | None = None
    """prompt tokens found in the cache at the first start; None before it"""
    started_at: float | None = None
    """when that was (`SequenceDelta.started_at`)"""
    first_step: int = 0
    """how many steps had ended when its first token came; 0: another core computed that"""
    next_prompt_logprob: int = 1
    """first prompt position whose log-probability has not been delivered (position 0 has none)"""
    tenant: str = ""
    """whose it is, by name"""
    passed: int = 0
    """times that one that came later started before it, because it found more in the prefix cache"""
    begun: bool = False
    """callers have been given something of its request, by another core"""
    interrupted: bool = False
    """it was preempted"""
    arrived_at: float = 0.0
    """on the scheduler's clock"""
    promised: tuple[float, float] | None = None
    """seconds and steps that it was expected to take, if it was let in for a deadline that could be kept"""
    deadline: float | None = None
    """when it is to have ended, on that clock"""
    max_blocks: int = 0
    """what its request may hold at once, by itself"""
    pin: str | None = None
    """what its prompt is to be kept as"""
    hands_over: bool = False
    """its prompt is computed for another engine, which reads its blocks when it has ended"""
    landed: list[int] = field(default_factory=list)
    """blocks of the host tier that are held for it until it starts"""
    account: Account | None = None
    """whose it is, where the policy is fair, until it has ended"""
    cache_salt: str | None = None
    adapter: LoRARequest | None = None
    slot: int = -1
    """the adapter's, from before the sequence waits for a row until it has ended"""
    matcher: Matcher | None = None
    """how far what has arrived has come in the request's grammar"""
    drafts: list[int] = field(default_factory=list)
    """those that its grammar forces and the step computes that was planned last"""
    leader: Sequence | None = None
    """while it is FOLLOWING"""
    common: int = 0
    """while it is FOLLOWING: tokens that it has in common with its leader, as far as both were known"""
    followers: list[Sequence] = field(default_factory=list)
    """they are forked from this one, each as soon as what they have in common is computed"""
    group: BeamGroup | None = None
    """the search whose beams it may carry"""
    new_row: bool = False
    """the device knows nothing of its row yet"""
    rewrite_from: int | None = None
    """a choice was made among beams: the device holds other tokens from here on; the last one is to be computed"""
    moved: Growth = NO_GROWTH
    """what the device was not told of its block table (beams)"""

    def __post_init__(self) -> None:
        self.prompt_len = len(self.tokens)
        self.stop_token_ids = frozenset(self.params.stop_token_ids)
        self.siblings = [self]

    @property
    def newly_cached(self) -> int:
        """Prompt tokens from the cache, as long as nothing of this sequence has been delivered."""
        first = len(self.tokens) == self.prompt_len and self.next_prompt_logprob == 1
        return (self.cached_tokens or 0) if first else 0

    def undelivered(self, computed: int, entries: list[TokenLogprobs]) -> list[TokenLogprobs]:
        """Of a chunk's prompt log-probabilities (positions computed+1 …), those not delivered before a preemption."""
        fresh = entries[max(self.next_prompt_logprob - (computed + 1), 0) :]
        self.next_prompt_logprob += len(fresh)
        return fresh

    def ends_with(self, token: int) -> bool:
        """Whether ``token``, not appended yet, is a stop token that counts already."""
        generated = len(self.tokens) - self.prompt_len
        return token in self.stop_token_ids and generated >= self.params.min_tokens
