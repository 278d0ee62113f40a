"""Which request kills cores. Those that a core had when it died are suspects, unless they have got on in it; who was
there twice is tried with no other suspect beside it, so that the next death convicts it."""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Callable

TWICE = 2


class Suspects:
    """Requests by their names. Not thread-safe."""

    def __init__(self) -> None:
        self._deaths: Counter[str] = Counter()
        """in a row, in which a request has not got on"""
        self._waiting: deque[str] = deque()
        self._on_trial: str | None = None

    def of_death(self, present: list[str], got_on: Callable[[str], bool]) -> tuple[list[str], list[str]]:
        """A core died that had these. Returns those that go on at once, and those that are to blame. `got_on`: whether
        anything of it was delivered since it was sent there: what kills a core does so again at the same place. Beside
        one that is convicted all others are innocent."""
        on_trial, self._on_trial = self._on_trial, None
        if on_trial is not None and on_trial not in present:
            self._on_trial = on_trial
        elif on_trial is not None and not got_on(on_trial):
            del self._deaths[on_trial]
            return [name for name in present if name != on_trial], [on_trial]
        for name in present:
            self._deaths[name] = 0 if got_on(name) else self._deaths[name] + 1
        self._waiting += [name for name in present if self._deaths[name] >= TWICE]
        return [name for name in present if self._deaths[name] < TWICE], []

    def next(self, left: Callable[[str], list[str]]) -> str | None:
        """Who is to be tried now; None: nobody, or somebody is. `left`: what is left of a request."""
        if self._on_trial is not None and left(self._on_trial):
            return None
        self._on_trial = None
        while self._waiting and not left(self._waiting[0]):
            self._waiting.popleft()
        if self._waiting:
            self._on_trial = self._waiting.popleft()
        elif self._deaths:  # whoever has ended is forgotten
            self._deaths = Counter({name: count for name, count in self._deaths.items() if left(name)})
        return self._on_trial
