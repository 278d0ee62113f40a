"""When a core that died is followed by another one."""

from __future__ import annotations

from collections import deque

WINDOW_S = 600.0
MOST_WAIT_S = 30.0


class Restarts:
    """Times are seconds of one monotonic clock."""

    def __init__(self, most: int) -> None:
        """`most`: deaths within `WINDOW_S` that are followed by a start."""
        self._most = most
        self._deaths: deque[float] = deque()

    def died(self, now: float) -> float | None:
        """A core has died, or did not start: seconds until another one is to be started; None: there were too many.
        The first one is followed at once, each further one after twice as long."""
        self._deaths.append(now)
        while self._deaths[0] < now - WINDOW_S:
            self._deaths.popleft()
        count = len(self._deaths)
        if count > self._most:
            return None
        return 0.0 if count == 1 else min(2.0 ** (count - 2), MOST_WAIT_S)
