"""When a core that died is followed by another one."""

from __future__ import annotations

from collections import deque

WINDOW_S = 600.0
MOST_WAIT_S = 30.0


class Restarts:
    """Times are seconds of one monotonic clock."""

    def __init__(self, most: int) -> None:
        """`most`: deaths that are followed by a start, within `WINDOW_S`, and in a row of which none computed anything:
        who hangs dies so slowly that few of them fall into any window."""
        self._most = most
        self._deaths: deque[float] = deque()
        self._in_a_row = 0

    def died(self, now: float, has_served: bool = False) -> float | None:
        """A core has died, or did not start: seconds until another one is to be started; None: there were too many.
        One that has computed something, or had nothing to compute, is followed at once, and so is the first one that
        has not; each further one in a row after twice as long."""
        while self._deaths and self._deaths[0] < now - WINDOW_S:
            self._deaths.popleft()
        self._in_a_row = 0 if has_served else self._in_a_row + 1
        self._deaths.append(now)
        if len(self._deaths) > self._most or self._in_a_row > self._most:
            self._in_a_row = 0  # whoever goes on without does so for as long as deaths count
            return None
        return 0.0 if self._in_a_row <= 1 else min(2.0 ** (self._in_a_row - 2), MOST_WAIT_S)
