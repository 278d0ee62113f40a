"""When those that are refused are to ask again: one behind the other, or they would all come at once and be refused."""

from __future__ import annotations

import heapq
from collections import OrderedDict

_MOST_S = 60.0
"""OpenAI's SDK waits no longer because it was told to. Who would have to comes in the later half of it, and is told the
next time then"""
_GOLDEN = 0.618034
"""whose multiples lie apart, cut to what is behind the point"""
_MOST_LINES, _MOST_DUE = 1024, 4096
_PATIENCE_S = 2.0
"""behind its time who has not come does not come"""
_LEARNS = 0.1
"""a part of what is thought of all that each one tells"""


class ReturnTimes:
    def __init__(self) -> None:
        self._ends: OrderedDict[object, float] = OrderedDict()
        """of each line: when the server would have done what was refused, were it done at once, and did all come"""
        self._beyond = 0
        """that would not have fit into `_MOST_S`"""
        self._due: list[float] = []
        """when those come that stand in lines: a heap"""
        self._come = 1.0
        """which part of them does"""

    def came(self, now: float) -> None:
        """Somebody has: it may be one that was told to, or another one in its stead."""
        while self._due and self._due[0] < now - _PATIENCE_S:
            heapq.heappop(self._due)
            self._come *= 1.0 - _LEARNS
        if self._due and self._due[0] <= now + _PATIENCE_S:
            heapq.heappop(self._due)
            self._come += (1.0 - self._come) * _LEARNS

    def take(self, line: object, now: float, earliest_s: float, each_s: float) -> float:
        """Seconds from now: `earliest_s`, and what those take who were told before in the same line, `each_s` of the
        server's time each, as far as they come. Those who are in nobody's way stand in lines of their own."""
        line_s = max(self._ends.get(line, now) - now, 0.0)
        seconds = earliest_s + line_s * self._come
        if seconds <= _MOST_S or not line_s:
            self._ends[line] = now + line_s + each_s
            self._ends.move_to_end(line)
            while len(self._ends) > _MOST_LINES:
                self._ends.popitem(last=False)
            if len(self._due) < _MOST_DUE:
                heapq.heappush(self._due, now + seconds)
            return seconds
        self._beyond += 1
        return max(earliest_s, _MOST_S * (0.5 + 0.5 * (self._beyond * _GOLDEN % 1.0)))
