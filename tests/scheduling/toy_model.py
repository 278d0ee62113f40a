"""The model of a device without one: what it samples is a function of digests of a sequence's past, so a wrong slot
gives a wrong token. `generate` and `search` are the oracle: the same functions over the sequence's own tokens, without
blocks, batches or steps.
"""

from __future__ import annotations

from collections.abc import Collection

from toy_grammars import VOCAB, allowed, length_of

from engine.beam_search import BeamSearch, Hypothesis
from engine.core.wire import BeamParams
from engine.step import TokenLogprobs

POISON = 10_000
"""A token of a prompt that makes every logit from its position on NaN."""
_MASK = (1 << 61) - 1


def _mix(state: int, value: int) -> int:
    return (state * 6364136223846793005 + value * 1442695040888963407 + 97) & _MASK


def digests(tokens: list[int], adapter: int = 0) -> list[int]:
    out, state = [], 7 + adapter
    for token in tokens:
        state = _mix(state, token)
        out.append(state)
    return out


def sample(slots: list[int], seed: int, may: Collection[int] = range(VOCAB)) -> int:
    """The first of those that it `may` be, from a token on that what the slots hold decides."""
    state = 3 + seed
    for slot in slots:
        state = _mix(state, slot)
    return next(token for step in range(VOCAB) if (token := ((state >> 17) + step) % VOCAB) in may)


def candidates(slots: list[int], count: int, may: Collection[int] = range(VOCAB)) -> TokenLogprobs:
    """The likeliest tokens after what the slots hold, best first, behind the one that is sampled: mostly the best."""
    state = 5
    for slot in slots:
        state = _mix(state, slot)
    scores = [(token, -1 - (_mix(state, token) >> 20) % 997 / 100) for token in range(VOCAB) if token in may]
    best = sorted(scores, key=lambda one: -one[1])[:count]
    tokens, logprobs = zip(best[-1 if state % 7 == 0 else 0], *best)
    return TokenLogprobs(token_ids=list(tokens), logprobs=list(logprobs), rank=1)


def _may(grammar: str | None, count: int) -> Collection[int]:
    return range(VOCAB) if grammar is None else allowed(grammar, count)


def search(
    prompt: list[int], max_total: int, stop: set[int], beams: BeamParams, grammar: str | None = None, adapter: int = 0
) -> list[Hypothesis]:
    """Unbatched beam search."""
    found = BeamSearch(beams, frozenset(stop), max_total - len(prompt))
    texts: list[list[int]] = [[]]
    while True:
        may = _may(grammar, len(texts[0]))
        brought = [candidates(digests(prompt + text, adapter), found.num_candidates, may) for text in texts]
        choices = found.advance(brought, texts.__getitem__)
        if choices is None:
            return found.finished
        texts = [[*texts[parent], token] for parent, token in choices]


def generate(
    prompt: list[int],
    max_total: int,
    stop: set[int],
    min_tokens: int = 0,
    seed: int = 0,
    grammar: str | None = None,
    adapter: int = 0,
) -> tuple[list[int], str]:
    """Unbatched: (generated tokens, finish reason)."""
    tokens = list(prompt)
    while True:
        if POISON in tokens:
            return tokens[len(prompt) :], "error"
        token = sample(digests(tokens, adapter), seed, _may(grammar, len(tokens) - len(prompt)))
        counted = len(tokens) - len(prompt) >= min_tokens
        tokens.append(token)
        if token in stop and counted:
            return tokens[len(prompt) :], "stop"
        if grammar is not None and len(tokens) - len(prompt) == length_of(grammar) > 0:
            return tokens[len(prompt) :], "stop"
        if len(tokens) >= max_total:
            return tokens[len(prompt) :], "length"
