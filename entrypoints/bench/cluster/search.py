"""The fewest that do."""

from __future__ import annotations

from collections.abc import Callable

from engine.errors import ConfigError, EngineError
from entrypoints.bench.cluster.outcome import Outcome


def fewest(run: Callable[[int], Outcome], holds: Callable[[Outcome], bool], most: int) -> list[tuple[int, Outcome]]:
    """What was run, by how many there are, up to the fewest that hold. Raises ConfigError where `most` do not.

    More are taken to be better: doubled until they hold, then halved in between.
    """
    seen: dict[int, Outcome] = {}
    failed: dict[int, EngineError] = {}

    def does(size: int) -> bool:
        try:
            seen[size] = run(size)
        except ConfigError:
            raise
        except EngineError as error:  # too many waited, say
            failed[size] = error
            return False
        return holds(seen[size])

    low, high = 0, 1
    while not does(high):
        if high == most:
            raise ConfigError(f"not even {most} hold: {seen.get(most) or failed[most]}")
        low, high = high, min(2 * high, most)
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (low, middle) if does(middle) else (middle, high)
    return [(size, seen[size]) for size in sorted(seen) if size <= high]
