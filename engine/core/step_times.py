"""How long the latest steps took: what a step that does not end is measured by."""

from __future__ import annotations

_WINDOW = 512
_SHARE = 0.99


class StepTimes:
    """The loop's thread adds, any other may read."""

    def __init__(self) -> None:
        self.count = 0
        self._latest: list[float] = []

    def add(self, seconds: float) -> None:
        if self.count < _WINDOW:
            self._latest.append(seconds)
        else:
            self._latest[self.count % _WINDOW] = seconds
        self.count += 1

    def slowest(self) -> float:
        """What all but one in a hundred of the latest steps took at most; 0 before the first."""
        ordered = sorted(self._latest)  # a copy, so the loop may go on adding
        return ordered[int(_SHARE * (len(ordered) - 1) + 0.5)] if ordered else 0.0
