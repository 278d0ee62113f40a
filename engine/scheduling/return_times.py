"""When those that are refused are to ask again: one behind the other, or they would all come at once and be refused."""

from __future__ import annotations

from collections import OrderedDict

_MOST_S = 60.0
"""OpenAI's SDK waits no longer because it was told to. Who would have to comes in the later half of it, and is told the
next time then"""
_GOLDEN = 0.618034
"""whose multiples lie apart, cut to what is behind the point"""
_MOST_LINES = 1024


class ReturnTimes:
    def __init__(self) -> None:
        self._ends: OrderedDict[object, float] = OrderedDict()
        """of each line: when the server would have done what was refused, were it done at once"""
        self._beyond = 0
        """that would not have fit into `_MOST_S`"""

    def take(self, line: object, now: float, earliest_s: float, each_s: float) -> float:
        """Seconds from now: `earliest_s`, and what those take who were told before in the same line, `each_s` of the
        server's time each. Those who are in nobody's way stand in lines of their own."""
        wait_s = max(self._ends.get(line, now) - now, 0.0)
        if earliest_s + wait_s <= _MOST_S or not wait_s:
            self._ends[line] = now + wait_s + each_s
            self._ends.move_to_end(line)
            while len(self._ends) > _MOST_LINES:
                self._ends.popitem(last=False)
            return earliest_s + wait_s
        self._beyond += 1
        return max(earliest_s, _MOST_S * (0.5 + 0.5 * (self._beyond * _GOLDEN % 1.0)))
