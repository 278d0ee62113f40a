"""What callers have been given of each request, so that another replica can compute it again and nobody notices.

A request's tokens follow from its seed, so a replica that takes it over brings the same ones: what has been delivered
is left out, and compared. Where it differs (another rounding, and a choice that hung on it), the request ends with an
error: half of one answer and half of another are none.
"""

from __future__ import annotations

from collections.abc import Iterable

import msgspec

from engine.core.wire import AddRequest, Delta, SequenceDelta, TokenDeltas

DIVERGED = (
    "the replica that computed it was lost, and what another one computed again differs from what had been delivered"
)


class _Request(msgspec.Struct, eq=False):
    message: AddRequest
    replica: int
    left: set[str]
    """of its sequences, those that have not ended"""


class _Sequence(msgspec.Struct, eq=False):
    request: _Request
    tokens: list[int] = []
    """delivered"""
    seen: int = 0
    """of them, those that the replica that has it now has brought"""
    prompt_logprobs: int = 0
    seen_prompt_logprobs: int = 0

    @property
    def repeats(self) -> bool:
        return self.seen < len(self.tokens) or self.seen_prompt_logprobs < self.prompt_logprobs


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
    diverged: list[str] = []
    """sequences that are ended with an error here and go on at the replica"""


class Deliveries:
    """Requests by their `request_id`, sequences by their own. Not thread-safe."""

    def __init__(self) -> None:
        self._requests: dict[str, _Request] = {}
        self._sequences: dict[str, _Sequence] = {}

    def add(self, message: AddRequest, replica: int) -> None:
        request = _Request(message, replica, set(message.request_ids))
        self._requests[message.request_id] = request
        for name in message.request_ids:
            self._sequences[name] = _Sequence(request)

    def move(self, request_id: str, replica: int) -> list[str]:
        """Another replica computes it from its beginning. Returns those of its sequences that have ended before."""
        request = self._requests[request_id]
        request.replica = replica
        for name in request.left:
            sequence = self._sequences[name]
            sequence.seen = sequence.seen_prompt_logprobs = 0
        return [name for name in request.message.request_ids if name not in request.left]

    def message(self, request_id: str) -> AddRequest:
        return self._requests[request_id].message

    def left(self, request_id: str) -> list[str]:
        """Its sequences that have not ended."""
        request = self._requests[request_id]
        return [name for name in request.message.request_ids if name in request.left]

    def replica_of(self, name: str) -> int | None:
        """Of a sequence; None: it has ended."""
        sequence = self._sequences.get(name)
        return None if sequence is None else sequence.request.replica

    def end(self, name: str) -> Ended | None:
        """A sequence ends here; None: it had ended."""
        sequence = self._sequences.pop(name, None)
        if sequence is None:
            return None
        request = sequence.request
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
        get, known = self._sequences.get, 0
        others: list[int] = []
        for index, name in enumerate(delta.request_ids):
            sequence = get(name)
            if sequence is not None and sequence.request.replica == replica and not sequence.repeats:
                sequence.tokens.append(delta.token_ids[index])
                sequence.seen += 1
                known += 1
            else:
                others.append(index)
        if not others:
            news.deltas.append(delta)
            return
        if known:
            kept = [index for index in range(len(delta.request_ids)) if index not in set(others)]
            names, tokens = [delta.request_ids[i] for i in kept], [delta.token_ids[i] for i in kept]
            news.deltas.append(TokenDeltas(request_ids=names, token_ids=tokens))
        for index in others:
            single = SequenceDelta(request_id=delta.request_ids[index], token_ids=[delta.token_ids[index]])
            self._take(replica, single, news)

    def _take(self, replica: int, delta: SequenceDelta, news: News) -> None:
        sequence = self._sequences.get(delta.request_id)
        if sequence is None or sequence.request.replica != replica:
            return
        if delta.token_ids or delta.pooled:
            news.began.append(sequence.request.message.request_id)
        if sequence.repeats:
            repeated = _without_repeated(sequence, delta)
            if repeated is None:
                news.diverged.append(delta.request_id)
                repeated = SequenceDelta(
                    request_id=delta.request_id, finish_reason="error", error=DIVERGED, error_kind="fault"
                )
            delta = repeated
        sequence.tokens += delta.token_ids
        sequence.seen += len(delta.token_ids)
        sequence.prompt_logprobs += len(delta.prompt_logprobs)
        sequence.seen_prompt_logprobs += len(delta.prompt_logprobs)
        if delta.finish_reason is not None and (ended := self.end(delta.request_id)) is not None:
            news.ended.append(ended)
        if delta != SequenceDelta(request_id=delta.request_id):
            news.deltas.append(delta)


def _without_repeated(sequence: _Sequence, delta: SequenceDelta) -> SequenceDelta | None:
    """What of `delta` has not been delivered; None: it differs from what has. Counts what is left out as seen."""
    count = min(len(sequence.tokens) - sequence.seen, len(delta.token_ids))
    prompt = min(sequence.prompt_logprobs - sequence.seen_prompt_logprobs, len(delta.prompt_logprobs))
    end = sequence.seen + count
    if sequence.tokens[sequence.seen : end] != delta.token_ids[:count]:
        return None
    if delta.finish_reason in ("stop", "length") and end < len(sequence.tokens):
        return None
    sequence.seen = end
    sequence.seen_prompt_logprobs += prompt
    was_told = bool(sequence.tokens)
    return msgspec.structs.replace(
        delta,
        token_ids=delta.token_ids[count:],
        logprobs=delta.logprobs[count:],
        prompt_logprobs=delta.prompt_logprobs[prompt:],
        started_at=None if was_told else delta.started_at,
        cached_tokens=0 if was_told else delta.cached_tokens,
        accepted_tokens=min(delta.accepted_tokens, len(delta.token_ids) - count),
    )
