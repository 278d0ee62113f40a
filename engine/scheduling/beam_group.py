"""The beams of one request: which sequences carry them, on which rows, and what they still wait for.

A group has `width` sequences from its admission to its end. What a choice does is permute histories among them: the
first child of a beam stays on its parent's sequence, others take over a sequence whose own beam was dropped, and share
the parent's blocks.
"""

from __future__ import annotations

from engine.core.wire import SequenceDelta
from engine.kv_cache.kv_cache import KVCache
from engine.scheduling.beam_search import BeamSearch, Candidates, Choice
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
        self._candidates: dict[Sequence, Candidates] = {}

    def waits(self, member: Sequence) -> bool:
        """Nothing of it can be computed before the next choice."""
        return member.in_flight > 0 or member in self._candidates

    def bring(self, member: Sequence, found: TokenLogprobs) -> bool:
        """A beam's candidates. Returns whether all beams have theirs."""
        self._candidates[member] = list(zip(found.token_ids[1:], found.logprobs[1:], strict=True))
        return len(self._candidates) == len(self.beams)

    @property
    def at_rest(self) -> bool:
        """Every beam has its tokens, and no step is under way that would bring candidates."""
        return not self._candidates and not any(member.in_flight for member in self.members)

    def drop_candidates(self) -> None:
        """The beams will be computed again."""
        self._candidates.clear()

    def choose(self) -> list[Choice] | None:
        """None: the search is over."""
        candidates = [self._candidates[beam] for beam in self.beams]
        self._candidates.clear()
        return self.search.advance(candidates, [beam.tokens[beam.prompt_len :] for beam in self.beams])

    def follow(self, choices: list[Choice], kv: KVCache) -> list[Sequence]:
        """Give every choice a sequence that has its tokens and shares its parent's blocks. Returns those that carried a
        beam, or were to, and do not any more; their blocks are given back."""
        parents = [self.beams[choice.parent] for choice in choices]
        carriers: list[Sequence | None] = []
        for i, parent in enumerate(parents):
            carriers.append(parent if parent not in parents[:i] else None)
        spare = [member for member in self.members if member not in parents]
        for member in spare:
            kv.free(member.blocks)
        beams = [carrier or spare.pop(0) for carrier in carriers]
        for beam, parent in zip(beams, parents, strict=True):
            if beam is not parent:
                beam.blocks = kv.fork(parent.blocks)
                beam.tokens, beam.computed = parent.tokens.copy(), parent.computed
                beam.rewrite_from, beam.moved = beam.prompt_len, True
        for beam, choice in zip(beams, choices, strict=True):
            if not beam.moved:
                beam.rewrite_from = len(beam.tokens)
            beam.tokens.append(choice.token)
        self.beams = beams
        return spare

    def results(self, cached_tokens: int) -> list[SequenceDelta]:
        """What is told of a search that is over: one end for each id."""
        deltas = []
        for request_id, found in zip(self.request_ids, self.search.finished, strict=False):
            deltas.append(
                SequenceDelta(
                    request_id=request_id,
                    token_ids=found.token_ids,
                    finish_reason="stop" if found.stopped else "length",
                    stop_token_id=found.token_ids[-1] if found.stopped else None,
                    cached_tokens=cached_tokens,
                    cumulative_logprob=found.logprob,
                    score=found.score,
                )
            )
        missing = self.request_ids[len(deltas) :]  # of a vocabulary that has not as many sequences
        return deltas + [SequenceDelta(request_id=request_id, finish_reason="length") for request_id in missing]
