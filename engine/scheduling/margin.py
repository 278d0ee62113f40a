"""How much longer than was expected of them those take that were let in for a deadline: whoever comes is held to that.

Seen of those that run, not of those that have ended: what makes all of them late is known while most of it can still be
avoided, and those that are late end last, so of those that have ended, too few are.
"""

from __future__ import annotations

import math

import numpy as np

_REST, _LEAST, _MOST = 1.25, 1.0, 2.0
_SURE = 0.97
"""the part of them that takes no longer"""
_CLOSE = 1.1
"""times what was expected of one, and the margin, it was given at most, if it had no time to lose"""
_FADES = 3.0
"""times what they were given is the time in which what was seen fades by a factor of e: a machine that was slow for a
while will be again"""


class Margin:
    def __init__(self, now: float) -> None:
        self.times = _REST
        self._at = now
        """when it was looked at"""

    def look(self, now: float, deadline_s: float, given: np.ndarray, expected: np.ndarray, takes: np.ndarray) -> None:
        """Somebody comes for a deadline, in so many seconds. Of each that runs, float64 [rows]: seconds that it was
        given, that were expected of it when it came (NaN: it was promised nothing), and that it will have taken by what
        is known now. Those that had more time than they needed say nothing: others were let in at their cost. While
        there are no others, what was seen is forgotten, or those that it keeps out could never show that it is over."""
        close = (expected > 0) & (expected * self.times * _CLOSE >= given)
        rest, seen, span_s = _REST, 0.0, deadline_s
        if close.any():
            times = np.sort(takes[close] / expected[close])
            rest, seen, span_s = _LEAST, float(times[math.ceil(_SURE * len(times)) - 1]), float(np.median(given[close]))
        kept = math.exp(-max(now - self._at, 0.0) / max(_FADES * span_s, 1e-3))
        self.times, self._at = min(max(seen, rest + (self.times - rest) * kept), _MOST), now
