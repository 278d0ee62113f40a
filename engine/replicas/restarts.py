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
        self._in_a_row = self._not_started = 0

    def started(self) -> None:
        """A core serves, or none is to start."""
        self._not_started = 0

    def did_not_start(self, now: float) -> float | None:
        """As `died`; so many of them with none that started between are too many, however long each took: one that
        hangs in its start dies so late that few deaths fall into any window."""
        self._not_started += 1
        wait_s = self.died(now)
        if wait_s is None or self._not_started > self._most:
            self._not_started = 0  # whoever goes on begins anew
            return None
        return wait_s

    def died(self, now: float, has_served: bool = False) -> float | None:
        """A core has died: seconds until another one is to be started; None: there were too many.
        One that has computed something is followed at once, and so is the first one that has not; each further one in
        a row after twice as long."""
        while self._deaths and self._deaths[0] < now - WINDOW_S:
            self._deaths.popleft()
        self._in_a_row = 0 if has_served else self._in_a_row + 1 if self._deaths else 1
        self._deaths.append(now)
        if len(self._deaths) > self._most:
            return None
        return 0.0 if self._in_a_row <= 1 else min(2.0 ** (self._in_a_row - 2), MOST_WAIT_S)
