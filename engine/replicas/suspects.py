"""Which request kills cores. Those that a core had begun when it died are suspects, unless they have got on in it; who
was there twice is tried in a core where nobody else is but who was acquitted, so that the next death convicts it."""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Callable

TWICE = 2


class Suspects:
    """Requests by their names. Not thread-safe. `left`: what is left of one. `got_on`: whether something of it was
    delivered since it was sent where it is: what kills a core does so again at the same place. `well_on`: whether more
    was than a core computes and has not told when it dies: then that place is behind it."""

    def __init__(self) -> None:
        self._deaths: Counter[str] = Counter()
        """in which nothing had come of a request, since it was well on"""
        self._waiting: deque[str] = deque()
        self._on_trial: str | None = None

    def of_death(
        self,
        present: list[str],
        begun: Callable[[str], bool],
        got_on: Callable[[str], bool],
        well_on: Callable[[str], bool],
    ) -> tuple[list[str], list[str]]:
        """A core died that had these, of which some may only have waited. Returns those that go on at once, and who is
        to blame: a suspect, where all others that it had begun were well on."""
        if self._on_trial in present:
            self._on_trial = None
        there = [name for name in present if begun(name)]
        still = [name for name in there if not got_on(name)]
        alone = all(well_on(name) for name in there if name not in still)
        if len(still) == 1 and alone and self._deaths[still[0]] >= TWICE:
            del self._deaths[still[0]]
            return [name for name in present if name not in still], still
        for name in present:
            if name in still:
                self._deaths[name] += 1
            elif well_on(name):
                self._deaths.pop(name, None)
        self._waiting += [name for name in present if self._deaths[name] >= TWICE]
        return [name for name in present if self._deaths[name] < TWICE], []

    def is_one(self, name: str) -> bool:
        """It is to be tried."""
        return self._deaths.get(name, 0) >= TWICE

    def is_trying(self, left: Callable[[str], list[str]], well_on: Callable[[str], bool]) -> bool:
        """The trial goes on: who is well on, or over, is acquitted."""
        name = self._on_trial
        if name is None or (left(name) and not well_on(name)):
            return name is not None
        self._on_trial = None
        self._deaths.pop(name, None)
        return False

    def next(self, left: Callable[[str], list[str]]) -> str | None:
        """Who is to be tried now, while nobody is; None: nobody waits for a trial."""
        waiting = self.take(left)
        if not waiting:
            return None
        self._on_trial, *others = waiting
        self._waiting += others
        return self._on_trial

    def forget(self, name: str) -> None:
        """It is over."""
        self._deaths.pop(name, None)

    def adjourn(self) -> None:
        """The court is gone."""
        self._on_trial = None

    def again(self, name: str) -> None:
        """Its trial could not be held."""
        self._on_trial = None
        self._waiting.appendleft(name)

    def take(self, left: Callable[[str], list[str]]) -> list[str]:
        """Those that wait for a trial, who get none."""
        waiting = [name for name in self._waiting if left(name)]
        self._waiting.clear()
        return waiting
