"""When those that are refused are to ask again: one behind the other, or they would all come at once and be refused."""

from __future__ import annotations

import math

_MOST_S = 60.0
"""OpenAI's SDK waits no longer because it was told to; whoever comes then is told the next time"""


class ReturnTimes:
    def __init__(self) -> None:
        self._last = -math.inf
        """the time that was told last"""

    def take(self, now: float, earliest_s: float, each_s: float) -> float:
        """Seconds from now: not before `earliest_s`, and `each_s`, what one that asks takes of the server, behind who
        was told last."""
        seconds = max(earliest_s, min(self._last + each_s - now, _MOST_S))
        self._last = now + seconds
        return seconds
