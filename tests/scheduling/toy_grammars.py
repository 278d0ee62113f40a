"""Grammars without a library: which tokens may come next is a hash of how many have come, and of which grammar it is.

A grammar's text is ``seed:length:delay``: an output is over after `length` tokens (0: never), and it compiles within
`delay` turns of the loop. ``broken`` does not compile; ``breaks:length:delay`` cannot say what comes after `length`.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from engine.errors import InvalidRequestError
from engine.grammars.interface import Matcher

VOCAB = 11


def allowed(grammar: str, count: int) -> list[int]:
    """After `count` tokens; at least one."""
    seed = sum(grammar.split(":")[0].encode())
    return [t for t in range(VOCAB) if (seed * 31 + count * 17 + t * t * 7) % 3 == 0 or t == (seed + count) % VOCAB]


def length_of(grammar: str | None) -> int:
    return 0 if grammar is None or grammar.startswith("breaks") else int(grammar.split(":")[1])


class ToyMatcher:
    def __init__(self, grammar: str, count: int = 0) -> None:
        self.grammar, self.count = grammar, count

    def advance(self, token: int) -> None:
        if token not in allowed(self.grammar, self.count):
            raise InvalidRequestError(f"{token} is not allowed after {self.count} tokens of {self.grammar}")
        self.count += 1

    @property
    def is_over(self) -> bool:
        return self.count == length_of(self.grammar) > 0

    def forced(self) -> list[int]:
        """Some that are allowed, now and then one that is not."""
        name, length = self.grammar.split(":")[:2]
        count = (sum(name.encode()) + self.count * 5) % 4
        if name == "breaks" and self.count + count >= int(length):
            return []
        return [allowed(self.grammar, self.count + ahead)[0] for ahead in range(count)] + [3] * (self.count % 2)

    def copy(self) -> ToyMatcher:
        return ToyMatcher(self.grammar, self.count)


class ToyGrammars:
    def __init__(self) -> None:
        self.at_hand: set[str] = set()
        self.under_way: dict[str, int] = {}
        """turns that are left"""

    def begin(self, grammar: str) -> bool:
        delay = 0 if grammar == "broken" else int(grammar.split(":")[2])
        if grammar in self.at_hand or not delay:
            self.at_hand.add(grammar)
            return True
        self.under_way.setdefault(grammar, delay)
        return False

    def start(self, grammar: str) -> ToyMatcher:
        assert grammar in self.at_hand
        if grammar == "broken":
            raise InvalidRequestError("it is broken", "structured_outputs")
        return ToyMatcher(grammar)

    def turn(self) -> list[str]:
        """What has been compiled meanwhile."""
        self.under_way = {grammar: left - 1 for grammar, left in self.under_way.items()}
        done = [grammar for grammar, left in self.under_way.items() if left <= 0]
        for grammar in done:
            del self.under_way[grammar]
            self.at_hand.add(grammar)
        return done

    def fill(
        self, matchers: Sequence[Matcher | None], drafts: Sequence[Sequence[int]]
    ) -> tuple[np.ndarray, dict[int, str]]:
        bits: list[int] = []
        failed = {}
        for index, (matcher, tokens) in enumerate(zip(matchers, drafts, strict=True)):
            begin = len(bits)
            bits += [-1] * (1 + len(tokens))
            if isinstance(matcher, ToyMatcher):
                name, length = matcher.grammar.split(":")[:2]
                if name == "breaks" and matcher.count >= int(length):
                    failed[index] = "it broke"
                    continue
                after = matcher.copy()
                for place, draft in enumerate([*tokens, -1], begin):
                    if after.is_over:
                        break
                    may = allowed(after.grammar, after.count)
                    bits[place] = sum(1 << token for token in may)
                    if draft not in may:
                        break
                    after.count += 1
        return np.array(bits, dtype=np.int32).reshape(-1, 1), failed
