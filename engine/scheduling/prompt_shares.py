"""How prompts that are computed side by side share a step, so that nobody waits for all of somebody else's."""

from __future__ import annotations

from collections.abc import Sequence

LEAST = 8
"""What is less urgent and half-way has this part of a step, or it could hold what it has for ever."""


def prompt_shares(needs: Sequence[tuple[object, int]], budget: int, smallest: int) -> list[int]:
    """Tokens for each of several prompts, (urgency, tokens that are left), the most urgent first. Of those that are as
    urgent as the first one each takes half of what is left of the `budget`, or `smallest` if that is more, and the
    last one all of it, but for an eighth that the others have; what is over then goes to all in order, so that no step
    is smaller than it need be."""
    shares = [0] * len(needs)
    equals = sum(urgency == needs[0][0] for urgency, _ in needs)
    kept = min(budget // LEAST, sum(need for _, need in needs[equals:]))
    left = budget - kept
    for index in range(equals):
        share = left if index + 1 == equals else max(left // 2, smallest)
        shares[index] = min(needs[index][1], share, left)
        left -= shares[index]
    for index in range(equals, len(needs)):
        shares[index] = min(needs[index][1], kept)
        kept -= shares[index]
    for index, (_, need) in enumerate(needs):
        more = min(need - shares[index], left)
        shares[index] += more
        left -= more
    return shares
