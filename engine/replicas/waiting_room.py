"""Requests that no core has, because none serves: they wait for the next one, in bounds."""

from __future__ import annotations

import time
from collections.abc import Sequence

from engine.core.wire import AddRequest
from engine.errors import QueueFullError
from engine.replicas.deliveries import Deliveries
from engine.scheduling.shares import most_of_one

GIVEN_UP = "it waited for a core for too long"


class WaitingRoom:
    """In the order in which they came. Not thread-safe."""

    def __init__(self, most: int, is_fair: bool, deliveries: Deliveries) -> None:
        """`most`: sequences of those that come while no core serves; 0: none is to come. `is_fair`: one tenant's do not
        take all places."""
        self.most, self._is_fair, self._deliveries = most, is_fair, deliveries
        self._names: list[str] = []
        """of some nothing may be left"""
        self.retry_after_s = 1.0
        """for whom there is no place: about as long as a core takes to start"""

    def __bool__(self) -> bool:
        return bool(self._names)

    @property
    def num_sequences(self) -> int:
        return sum(len(self._deliveries.left(name)) for name in self._names)

    def enter(self, message: AddRequest) -> None:
        """One that comes. Raises `QueueFullError`."""
        self._names = [name for name in self._names if self._deliveries.left(name)]
        waiting, new = self.num_sequences, len(message.request_ids)
        if waiting + new > self.most:
            limit = f"{self.most} (--max-waiting + --max-num-seqs)"
            raise QueueFullError(f"{waiting} sequences wait for a replica, of {limit}", self.retry_after_s)
        own = sum(
            len(self._deliveries.left(name))
            for name in self._names
            if self._is_fair and self._deliveries.message(name).tenant.name == message.tenant.name
        )
        if own + new > most_of_one(self.most - waiting, new):
            raise QueueFullError(
                f"{own} sequences of this client wait for a replica already, and some places are for others",
                self.retry_after_s,
            )
        self._deliveries.add(message, None)
        self._names.append(message.request_id)

    def keep(self, names: Sequence[str]) -> None:
        """Those that a core had."""
        self._names += names

    def take(self) -> list[str]:
        """All of them."""
        names, self._names = self._names, []
        return names

    def take_overdue(self) -> list[str]:
        """Those that have waited for as long as they may, and of which nothing was given."""
        now = time.monotonic()
        late = [name for name in self._names if self._deliveries.is_overdue(name, now)]
        self._names = [name for name in self._names if name not in late]
        return late
