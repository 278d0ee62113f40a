"""What callers have been given of each request, so that another core can go on behind it and nobody notices.

A request that moves is sent anew with the tokens that were delivered; whoever takes it over computes them as part of
its prompt and draws the next ones, which follow from the seed and the position. Nothing is drawn twice, so nothing can
differ from what was delivered, and nothing of it comes again.
"""

from __future__ import annotations

import time
from array import array
from collections.abc import Iterable

import msgspec
from msgspec.structs import replace

from engine.core.wire import AddRequest, Delta, Resumed, SequenceDelta, TokenDeltas
from engine.speculation_config import SpeculationConfig

STEPS = 16
"""more than a core has computed and not told when it dies: in flight, and under way"""


class _Request(msgspec.Struct, eq=False):
    message: AddRequest
    replica: int | None
    """None: it waits for one"""
    left: set[str]
    """of its sequences, those that have not ended"""
    came_at: float
    waits_from: float
    """it has waited for its turn since then"""
    begun: bool = False
    """something was delivered of a sequence that has ended"""


class _Sequence(msgspec.Struct, eq=False):
    request: _Request
    tokens: array[int] = msgspec.field(default_factory=lambda: array("i"))
    """delivered"""
    had: int = 0
    """tokens that had been delivered when the replica was given it"""
    prompt_logprobs: int = 0
    was_told: bool = False
    """when it started"""


class Ended(msgspec.Struct, frozen=True):
    """A sequence."""

    name: str
    """of its request"""
    generated: int
    """tokens"""


class News(msgspec.Struct):
    """What of a step's outputs concerns callers, and what follows from it."""

    deltas: list[Delta] = []
    began: list[str] = []
    """requests that have brought something; again and again"""
    ended: list[Ended] = []


class Deliveries:
    """Requests by their `request_id`, sequences by their own. Not thread-safe."""

    def __init__(self, speculation: SpeculationConfig) -> None:
        self._speculation = speculation
        self._requests: dict[str, _Request] = {}
        self._sequences: dict[str, _Sequence] = {}

    def add(self, message: AddRequest, replica: int | None) -> None:
        """None: it waits for one, and is to `move`."""
        now = time.monotonic()
        request = _Request(message, replica, set(message.request_ids), now, now)
        self._requests[message.request_id] = request
        for name in message.request_ids:
            self._sequences[name] = _Sequence(request)

    def move(self, request_id: str, replica: int | None) -> None:
        """Another replica goes on with it, as `resumed` says; None: it waits for one. What the one before tells of it
        from now on is nobody's."""
        self._requests[request_id].replica = replica
        for sequence in self._sequences_of(request_id):
            sequence.had = len(sequence.tokens)

    def waits_anew(self, request_ids: Iterable[str]) -> None:
        """They had their turn, or were not to have it. Deadlines do not begin anew."""
        for name in request_ids:
            self._requests[name].waits_from = time.monotonic()

    def waited_less(self, seconds: float) -> None:
        """All of them."""
        now = time.monotonic()
        for request in self._requests.values():
            request.waits_from = min(request.waits_from + seconds, now)

    def got_on(self, request_id: str) -> bool:
        """Something of it was delivered since then, of each sequence of which anything had been: others may wait for
        their turn."""
        return self._least(request_id) > 0

    def well_on(self, request_id: str) -> bool:
        """So much that it is behind all that a core computed of it before."""
        drafts = self._speculation.num_speculative_tokens
        drafted = self._speculation.method is not None or self._requests[request_id].message.grammar is not None
        return self._least(request_id) >= STEPS * (1 + drafts * drafted)

    def _least(self, request_id: str) -> int:
        sequences = self._sequences_of(request_id)
        began = [each for each in sequences if each.had]
        if began:
            return min(len(each.tokens) - each.had for each in began)
        return max((len(each.tokens) for each in sequences), default=0)

    def _sequences_of(self, request_id: str) -> list[_Sequence]:
        return [self._sequences[name] for name in self._requests[request_id].left]

    def message(self, request_id: str) -> AddRequest:
        """As it came."""
        return self._requests[request_id].message

    def resumed(self, request_id: str) -> AddRequest:
        """What is left of it. Its sequences have their names, whichever of them comes first."""
        message, left = self._as_late(request_id), self.left(request_id)
        if message.beams is not None:
            return message
        had = [self._sequences[name] for name in left]
        first, *others = left
        params = message.params
        if first != message.request_id:  # whose the log-probabilities of the prompt were
            seed = next(each.seed for each in message.followers if each.request_id == first)
            params = replace(params, seed=seed, prompt_logprobs=None)
        is_new = not any(map(_was_given, had))
        return replace(
            message,
            request_id=first,
            params=params,
            followers=[each for each in message.followers if each.request_id in others],
            resumed=[] if is_new else [Resumed(each.tokens.tolist(), each.prompt_logprobs) for each in had],
        )

    def _as_late(self, request_id: str) -> AddRequest:
        """As it came, but what was left of its time has gone on."""
        request, now = self._requests[request_id], time.monotonic()
        message, begun = request.message, self._has_begun(request_id)
        wait_s, deadline_s = message.wait_s, message.deadline_s
        return replace(
            message,
            wait_s=None if wait_s is None or begun else max(request.waits_from + wait_s - now, 0.0),
            deadline_s=None if deadline_s is None else max(request.came_at + deadline_s - now, 0.0),
            accepted=True,
            begun=begun,
        )

    def _has_begun(self, request_id: str) -> bool:
        """Something of it was delivered."""
        return self._requests[request_id].begun or any(map(_was_given, self._sequences_of(request_id)))

    def is_overdue(self, request_id: str, now: float) -> bool:
        """It has waited for as long as it may, and nothing of it was delivered."""
        request = self._requests.get(request_id)
        if request is None or request.message.wait_s is None or self._has_begun(request_id):
            return False
        return now - request.waits_from >= request.message.wait_s

    def left(self, request_id: str) -> list[str]:
        """Its sequences that have not ended; none: it is over."""
        request = self._requests.get(request_id)
        return [] if request is None else [name for name in request.message.request_ids if name in request.left]

    def replica_of(self, name: str) -> int | None:
        """Of a sequence; None: it has ended, or waits for one."""
        sequence = self._sequences.get(name)
        return None if sequence is None else sequence.request.replica

    def end(self, name: str) -> Ended | None:
        """A sequence ends here; None: it had ended."""
        sequence = self._sequences.pop(name, None)
        if sequence is None:
            return None
        request = sequence.request
        request.begun |= _was_given(sequence)
        request.left.discard(name)
        if not request.left:
            del self._requests[request.message.request_id]
        return Ended(request.message.request_id, len(sequence.tokens))

    def take_in(self, replica: int, deltas: Iterable[Delta]) -> News:
        """What a replica has told. What is of nobody that it computes has ended meanwhile, or was moved."""
        news = News()
        for delta in deltas:
            if isinstance(delta, TokenDeltas):
                self._take_tokens(replica, delta, news)
            else:
                self._take(replica, delta, news)
        return news

    def _take_tokens(self, replica: int, delta: TokenDeltas, news: News) -> None:
        get, others = self._sequences.get, list[int]()
        for index, name in enumerate(delta.request_ids):
            sequence = get(name)
            if sequence is not None and sequence.request.replica == replica:
                sequence.tokens.append(delta.token_ids[index])
            else:
                others.append(index)
        if not others:
            news.deltas.append(delta)
        elif len(others) < len(delta.request_ids):
            kept = [index for index in range(len(delta.request_ids)) if index not in set(others)]
            names, tokens = [delta.request_ids[i] for i in kept], [delta.token_ids[i] for i in kept]
            news.deltas.append(TokenDeltas(request_ids=names, token_ids=tokens))

    def _take(self, replica: int, delta: SequenceDelta, news: News) -> None:
        sequence = self._sequences.get(delta.request_id)
        if sequence is None or sequence.request.replica != replica:
            return
        if delta.token_ids or delta.pooled:
            news.began.append(sequence.request.message.request_id)
        if sequence.was_told and (delta.started_at is not None or delta.cached_tokens):
            delta = replace(delta, started_at=None, cached_tokens=0)
        sequence.was_told |= delta.started_at is not None
        sequence.tokens.extend(delta.token_ids)
        sequence.prompt_logprobs += len(delta.prompt_logprobs)
        if delta.finish_reason is not None and (ended := self.end(delta.request_id)) is not None:
            news.ended.append(ended)
        if delta != SequenceDelta(request_id=delta.request_id):
            news.deltas.append(delta)


def _was_given(sequence: _Sequence) -> bool:
    return bool(sequence.tokens) or sequence.prompt_logprobs > 0
