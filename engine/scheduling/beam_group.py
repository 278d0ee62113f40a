"""The beams of one request: which sequences carry them, on which rows, and what they still wait for.

A group has `width` sequences from its admission to its end. What a choice does is permute histories among them: the
first child of a beam stays on its parent's sequence, others take over a sequence whose own beam was dropped, and share
the parent's blocks.
"""

from __future__ import annotations

from collections.abc import Callable

from engine.beam_search import BeamSearch, Choice
from engine.core.wire import SequenceDelta
from engine.grammars.interface import Matcher
from engine.kv_cache.kv_cache import KVCache
from engine.kv_cache.take_over import take_over
from engine.scheduling.sequence import Sequence
from engine.step import TokenLogprobs


class BeamGroup:
    def __init__(self, request_ids: list[str], search: BeamSearch, members: list[Sequence]) -> None:
        self.request_ids = request_ids
        """what clients call the sequences that are returned, best first"""
        self.search = search
        self.members = members
        self.beams = members[:1]
        """those that carry a beam, in the order of the last choices"""
        self.spare_rows: list[int] = []
        """reserved for members that carry none yet, or not again yet"""
        self._found: dict[Sequence, TokenLogprobs] = {}

    def bring(self, member: Sequence, found: TokenLogprobs) -> bool:
        """A beam's candidates. Returns whether all beams have theirs."""
        self._found[member] = found
        return len(self._found) == len(self.beams)

    def at_rest(self, in_flight: Callable[[Sequence], int]) -> bool:
        """Every beam has its tokens, and no step is under way that would bring candidates."""
        return not self._found and not any(map(in_flight, self.members))

    def drop_candidates(self) -> None:
        """The beams will be computed again."""
        self._found.clear()

    def choose(self) -> list[Choice] | None:
        """None: the search is over."""
        beams = self.beams
        candidates = [self._found[beam] for beam in beams]
        self._found.clear()
        return self.search.advance(candidates, lambda beam: beams[beam].tokens[beams[beam].prompt_len :])

    def follow(self, choices: list[Choice], kv: KVCache) -> list[Sequence]:
        """Give every choice a sequence that has its tokens and shares its parent's blocks. Returns those that carried a
        beam, or were to, and do not any more; their blocks are given back."""
        beams, computed = self.beams, len(self.beams[0].tokens)
        dropped = set(range(len(beams))).difference([parent for parent, _ in choices])
        spare = [beams[index] for index in dropped]
        if len(beams) < len(self.members):
            spare += [member for member in self.members if member not in beams]
        followed: set[int] = set()
        matchers = [_advanced(beams[index], token) for index, token in choices]
        self.beams = []
        for (index, token), matcher in zip(choices, matchers, strict=True):
            beam = parent = beams[index]
            if index not in followed:
                followed.add(index)
                beam.rewrite_from = computed
            else:
                beam = spare.pop()
                _take_over(beam, parent, computed, kv)
            beam.tokens.append(token)
            beam.matcher = matcher
            self.beams.append(beam)
        for member in spare:
            kv.free(member.blocks)
        return spare

    def results(self, first: Sequence) -> list[SequenceDelta]:
        """What is told of a search that is over: one end for each id. `first`: who computed the prompt."""
        deltas = []
        for request_id, found in zip(self.request_ids, self.search.finished, strict=False):
            deltas.append(
                SequenceDelta(
                    request_id=request_id,
                    token_ids=found.token_ids,
                    finish_reason="stop" if found.stopped else "length",
                    stop_token_id=found.token_ids[-1] if found.stopped else None,
                    cached_tokens=first.cached_tokens or 0,
                    started_at=first.started_at,
                    cumulative_logprob=found.logprob,
                    score=found.score,
                )
            )
        missing = self.request_ids[len(deltas) :]  # of a vocabulary that has not as many sequences
        return deltas + [SequenceDelta(request_id=request_id, finish_reason="length") for request_id in missing]


def _advanced(beam: Sequence, token: int) -> Matcher | None:
    """Where its grammar is behind the token, by itself: others may go on from the same beam."""
    if beam.matcher is None:
        return None
    matcher = beam.matcher.copy()
    matcher.advance(token)
    return matcher


def _take_over(beam: Sequence, parent: Sequence, computed: int, kv: KVCache) -> None:
    """The beam's own history was dropped, it goes on with the parent's, which is `computed`."""
    beam.moved = take_over(kv, beam.blocks, parent.blocks)
    beam.rewrite_from = max(beam.prompt_len, beam.moved.start * kv.block_size)
    beam.tokens[beam.rewrite_from :] = parent.tokens[beam.rewrite_from : computed]
