"""A core among several: what is known of it where requests are given to them."""

from __future__ import annotations

from typing import Generic, Protocol, TypeVar

import msgspec

from engine.core.begun import Begun
from engine.core.wire import CoreReady, CoreStats, ToCore


class Sender(Protocol):
    def send(self, message: ToCore) -> None:
        """As `CoreClient.send`."""
        ...

    def stalled(self) -> str | None:
        """As `CoreClient.stalled`."""
        ...

    def begun(self) -> Begun:
        """As `ProcessClient.begun`."""
        ...


C = TypeVar("C", bound=Sender)


class Replica(msgspec.Struct, Generic[C], eq=False):
    number: int
    """not used again"""
    place: int
    """among those that serve, the least that was free when it came: its name in logs, metrics and KV events"""
    client: C
    ready: CoreReady
    stats: CoreStats = CoreStats()
    draining: bool = False
    """it gets no more requests"""
    leaving: bool = False
    """nobody is to listen to it any more"""
