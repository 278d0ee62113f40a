"""When those that are refused are to ask again: one behind the other, or they would all come at once and be refused."""

from __future__ import annotations

import heapq
from collections import OrderedDict

_MOST_S = 60.0
"""OpenAI's SDK waits no longer because it was told to. Who would have to comes in the later half of it, and is told the
next time then"""
_GOLDEN = 0.618034
"""whose multiples lie apart, cut to what is behind the point"""
_MOST_LINES, _MOST_DUE = 1024, 256
_PATIENCE_S, _LONGER = 2.0, 0.25
"""behind its time, and that part of what was told, who has not come does not come: clients spread their waits"""
_LEARNS = 0.1
"""a part of what is thought of all that each one tells"""


class _Line:
    """Of those that are in each other's way."""

    def __init__(self) -> None:
        self.end = 0.0
        """when the server would have done what was refused, were it done at once, and did all come"""
        self.due: list[tuple[float, float]] = []
        """of those that stand in it, until when each is waited for, and when it was to come: a heap"""
        self.come = 1.0
        """which part of them does"""

    def came(self, now: float) -> None:
        while self.due and self.due[0][0] < now:
            heapq.heappop(self.due)
            self.come *= 1.0 - _LEARNS
        if self.due and self.due[0][1] <= now + _PATIENCE_S:
            heapq.heappop(self.due)
            self.come += (1.0 - self.come) * _LEARNS

    def wait_for(self, now: float, seconds: float) -> None:
        if len(self.due) < _MOST_DUE:
            heapq.heappush(self.due, (now + seconds * (1.0 + _LONGER) + _PATIENCE_S, now + seconds))


class ReturnTimes:
    def __init__(self) -> None:
        self._lines: OrderedDict[object, _Line] = OrderedDict()
        self._beyond = 0
        """that would not have fit into `_MOST_S`"""

    def came(self, line: object, now: float) -> None:
        """Somebody of that line has: it may be one that was told to, or another one in its stead."""
        if line in self._lines:
            self._lines[line].came(now)

    def take(self, line: object, now: float, earliest_s: float, each_s: float) -> float:
        """Seconds from now: `earliest_s`, and what those take who were told before in the same line, `each_s` of the
        server's time each, as far as they come. Those who are in nobody's way stand in lines of their own."""
        own = self._lines.setdefault(line, _Line())
        line_s = max(own.end - now, 0.0)
        seconds = earliest_s + line_s * own.come
        if seconds <= _MOST_S or not line_s:
            own.end = now + line_s + each_s
            own.wait_for(now, seconds)
            self._lines.move_to_end(line)
            while len(self._lines) > _MOST_LINES:
                self._lines.popitem(last=False)
            return seconds
        self._beyond += 1
        return max(earliest_s, _MOST_S * (0.5 + 0.5 * (self._beyond * _GOLDEN % 1.0)))
