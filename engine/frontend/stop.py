"""Stop strings over a stream of text whose pieces break anywhere.

Only the longest suffix that could still become a stop string is held back. The match that is complete first wins (of
two that end together, the longer): that answer does not depend on where the pieces break, and nothing waits longer
than it must.
"""

from __future__ import annotations

from collections.abc import Sequence


class StopMatcher:
    """Feed text, get back what may be shown. After a match (`matched`) nothing more is to be fed."""

    __slots__ = ("_held", "_include", "_stops", "matched")

    def __init__(self, stops: Sequence[str], *, include_stop: bool = False) -> None:
        self._stops = sorted(set(stops), key=len, reverse=True)
        self._include = include_stop
        self._held = ""
        self.matched: str | None = None

    def feed(self, text: str) -> str:
        """Text that is now certain. When a stop string completed: what precedes it (with it, if it is to be
        included)."""
        text = self._held + text
        end, stop = self._first_match(text)
        if stop is not None:
            self.matched = stop
            self._held = ""
            return text[:end] if self._include else text[: end - len(stop)]
        keep = self._open_suffix(text)
        self._held = text[len(text) - keep :]
        return text[: len(text) - keep]

    def flush(self) -> str:
        """The sequence ended otherwise: what was held back belongs to the text after all."""
        held, self._held = self._held, ""
        return held

    def _first_match(self, text: str) -> tuple[int, str | None]:
        best_end, best = len(text) + 1, None
        for stop in self._stops:  # longest first: the longer wins where two end together
            start = text.find(stop, 0, best_end)
            if start >= 0 and start + len(stop) < best_end:
                best_end, best = start + len(stop), stop
        return best_end, best

    def _open_suffix(self, text: str) -> int:
        best = 0
        for stop in self._stops:
            for size in range(min(len(stop) - 1, len(text)), best, -1):
                if text.endswith(stop[:size]):
                    best = size
                    break
        return best
