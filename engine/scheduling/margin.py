"""How much longer than was expected of them those take that were let in for a deadline: whoever comes is held to that.

Seen of those that run, at every arrival, not of those that have ended: what makes all of them late is known while most
of it can still be avoided, and those that are late end last, so of those that have ended, too few are.
"""

from __future__ import annotations

import math

import numpy as np

_FIRST, _LEAST, _MOST = 1.25, 1.0, 2.0
_SURE = 0.97
"""the part of them that takes no longer"""
_CLOSE = 1.1
"""times what was expected of one, and the margin, it was given at most, if it had no time to lose"""
_FADES = 3.0
"""times what they were given is the time in which the margin comes nearer to 1 by a factor of e: a machine that was
slow for a while will be again"""


class Margin:
    def __init__(self, now: float) -> None:
        self.times = _FIRST
        self._at = now
        """when it was looked at"""

    def look(self, now: float, left: np.ndarray, expected: np.ndarray, takes: np.ndarray) -> None:
        """Of each that runs, float64 [rows]: seconds that it was given, that were expected of it when it came, and that
        it will have taken by what is known now; NaN: of one that was promised nothing. Those that had more time than
        they needed say nothing: others were let in at their cost."""
        close = (expected > 0) & (expected * self.times * _CLOSE >= left)
        if not close.any():
            self._at = now
            return
        times = np.sort(takes[close] / expected[close])
        seen = float(times[math.ceil(_SURE * len(times)) - 1])
        faded = 1.0 + (self.times - 1.0) * math.exp((self._at - now) / (_FADES * max(left[close].mean(), 1e-3)))
        self.times, self._at = min(max(seen, faded, _LEAST), _MOST), now
