"""When replicas take steps that they can only take together: rounds, in which each may have nothing of its own to do.

Experts that are divided over replicas compute for everybody, so every step is a round of all, which nobody may enter
alone and nobody may wait for in vain. No round tells anybody when to begin; whoever hands requests out does: with every
request goes a `Wake` to all replicas, behind the request, its number one higher than the last one's.

As a round begins, each tells the others whether it is `busy` (has requests that have not ended) and which wake it has
seen last. A round is *quiet at n* when nobody was busy or computed anything, and n was the last wake of each. A replica
takes round r unless round r - `depth` was quiet at n, and it has seen no wake since n and has nothing to do. (`depth`
rounds are planned before the first one's outcome is known; so that outcome is known by then.)

Nobody is left alone: whoever takes round r although that outcome was quiet at n has seen a later wake, or has a request
whose wake is later; that wake comes to all, and each then takes round r, as it knows of the same outcome. Rounds are
over when requests are: with nobody busy and no wake under way, the next round is quiet.
"""

from __future__ import annotations

from collections import deque

from engine.config import EngineConfig
from engine.step import RoundEnd, RoundStart


def in_rounds(config: EngineConfig) -> bool:
    """Whether experts are divided over replicas."""
    return config.parallel.experts is not None and config.parallel.data > 1


class Rounds:
    """Of one replica, which takes `depth` of them at once."""

    def __init__(self, depth: int) -> None:
        self._seen = 0
        self._outcomes: deque[int | None] = deque([0] * depth)
        """of the rounds that decide about the next ones: at which wake each was quiet"""
        self.expert_tokens = self.experts_moved = 0
        """of all rounds that have ended: see `RoundEnd`"""

    def wake(self, number: int) -> None:
        """All requests that were sent with earlier ones, and this one's, have come."""
        self._seen = max(self._seen, number)

    def wanted(self, busy: bool) -> bool:
        """The next round is to be taken; the one that decides about it has ended."""
        quiet = self._outcomes[0]
        return busy or quiet is None or self._seen > quiet

    def begin(self, busy: bool) -> RoundStart:
        """The next one begins: what to tell the others."""
        self._outcomes.popleft()
        return RoundStart(busy, self._seen)

    def ended(self, end: RoundEnd) -> None:
        """The oldest one that began."""
        self._outcomes.append(end.quiet)
        self.expert_tokens += end.expert_tokens
        self.experts_moved += end.experts_moved
