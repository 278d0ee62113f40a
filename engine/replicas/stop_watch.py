"""Whether a replica was stopped by a signal while it has work: no descriptor tells."""

from __future__ import annotations

import logging
import time
from collections.abc import Sequence

from engine.child import is_stopped
from engine.core.client import ProcessClient

logger = logging.getLogger(__name__)

LOOK_S = 0.2
STOPPED_LOOKS = 3
"""looks in a row, rather than a time: where all of us were stopped and go on, time has passed for none of us"""
ALONE_LOOKS = 50
"""where nobody waits for it but its own requests, which the others could compute"""


class StopWatch:
    """`together`: replicas wait for each other. Else one is given up only where another one goes on."""

    def __init__(self, together: bool) -> None:
        self._together = together
        self._next_look = 0.0
        self._looks: dict[int, int] = {}
        """by process: how often in a row it was found stopped"""
        self._busy = False

    @property
    def look_s(self) -> float | None:
        """Until the next look; None: idle ones owe nothing."""
        return LOOK_S if self._busy else None

    def stopped(self, clients: Sequence[ProcessClient]) -> int | None:
        """Which of them was; to be called whenever something may have happened."""
        if not self._together and len(clients) == 1:
            return None
        self._busy = not all(client.idle for client in clients)
        now = time.monotonic()
        if not self._busy or now < self._next_look:
            return None
        self._next_look = now + LOOK_S
        self._looks = {client.pid: self._looks.get(client.pid, 0) + 1 for client in clients if is_stopped(client.pid)}
        if not self._together and len(self._looks) == len(clients):
            return None
        pids, most = [client.pid for client in clients], STOPPED_LOOKS if self._together else ALONE_LOOKS
        for pid, looks in self._looks.items():
            if looks == STOPPED_LOOKS < most:
                logger.warning(
                    "a replica (process %d) was stopped by a signal: others take over what it has in %.0f s, unless it "
                    "goes on",
                    pid,
                    (most - looks) * LOOK_S,
                )
        return next((pids.index(pid) for pid, looks in self._looks.items() if looks >= most), None)
