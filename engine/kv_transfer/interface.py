"""What the scheduler asks of whoever moves pages between engines, and what it is told."""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

import msgspec

from engine.kv_transfer.params import KVTransferParams


class FetchDone(msgspec.Struct, frozen=True, kw_only=True):
    """A fetch has ended, one way or the other: nothing writes to its blocks any more."""

    number: int
    error: str | None = None
    size_bytes: int = 0
    seconds: float = 0.0


class LeaseEnded(msgspec.Struct, frozen=True, kw_only=True):
    """The reader has what it wanted, or its time is over."""

    generation: int
    expired: bool = False


News = FetchDone | LeaseEnded


class Connector(Protocol):
    """All methods are the core's, return at once and raise nothing; news come through its inbox."""

    @property
    def most_leases(self) -> int:
        """At a time; older ones give way."""
        ...

    def offer(self, generation: int, pages: dict[bytes, int]) -> KVTransferParams:
        """Whoever has these parameters may read the device's blocks `pages`, by their keys in the prefix cache, until
        `LeaseEnded` or `withdraw`. `generation`: of the lease, never used again."""
        ...

    def withdraw(self, generation: int) -> None:
        """Nobody reads them any more, once this returns. No news come of it, or only such as were on their way."""
        ...

    def fetch(self, number: int, source: KVTransferParams, pages: dict[bytes, int]) -> None:
        """Bring pages, by their keys, into these blocks of the host tier; `FetchDone` comes in any case, once. With no
        pages the lease is given back, and nothing comes."""
        ...

    def failed(self, source: KVTransferParams, error: str) -> None:
        """A prompt is computed here, though its pages were promised."""
        ...


Inform = Callable[[News], None]
