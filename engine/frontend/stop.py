"""Stop strings over a stream of text whose pieces break anywhere.

Only the longest suffix that could still become a stop string is held back. The match that is complete first wins (of
two that end together, the longer): that answer does not depend on where the pieces break, and nothing waits longer
than it must. Each character of the text is looked at once for each stop string (Knuth, Morris, Pratt 1977), however
long they are and however much is held back: a token must not cost the event loop more than that.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache


class StopMatcher:
    """Feed text, get back what may be shown. After a match (`matched`) nothing more is to be fed."""

    __slots__ = ("_held", "_include", "_stops", "matched")

    def __init__(self, stops: Sequence[str], *, include_stop: bool = False) -> None:
        self._stops = [_Stop(stop) for stop in sorted(set(stops), key=len, reverse=True)]
        self._include = include_stop
        self._held = ""
        self.matched: str | None = None

    def feed(self, text: str) -> str:
        """Text that is now certain. When a stop string completed: what precedes it (with it, if it is to be
        included)."""
        first, matched = len(text) + 1, None
        for stop in self._stops:  # longest first: the longer wins where two end together
            end = stop.feed(text)
            if end is not None and end < first:
                first, matched = end, stop.text
        whole = self._held + text
        if matched is not None:
            self.matched = matched
            end = len(self._held) + first
            self._held = ""
            return whole[:end] if self._include else whole[: end - len(matched)]
        certain = len(whole) - max((stop.open for stop in self._stops), default=0)
        self._held = whole[certain:]
        return whole[:certain]

    def flush(self) -> str:
        """The sequence ended otherwise: what was held back belongs to the text after all."""
        held, self._held = self._held, ""
        return held


class _Stop:
    """One of them; `open`: how many of its characters the text ends with."""

    __slots__ = ("open", "text")

    def __init__(self, text: str) -> None:
        self.text = text
        self.open = 0

    def feed(self, text: str) -> int | None:
        """The index behind its first end in `text`, if there is one."""
        stop, state = self.text, self.open
        at, size, fallbacks = 0, len(stop), _fallbacks(stop)
        while at < len(text):
            if state == 0:
                at = text.find(stop[0], at)
                if at < 0:
                    break
                state = 1
            else:
                while state and stop[state] != text[at]:
                    state = fallbacks[state - 1]
                if stop[state] == text[at]:
                    state += 1
            at += 1
            if state == size:
                return at
        self.open = state
        return None


@lru_cache(256)
def _fallbacks(stop: str) -> tuple[int, ...]:
    """For each of its beginnings the longest shorter one that it ends with."""
    found, state = [0], 0
    for character in stop[1:]:
        while state and stop[state] != character:
            state = found[state - 1]
        if stop[state] == character:
            state += 1
        found.append(state)
    return tuple(found)
