"""Sets of host buffers that take turns, so that no step refills what the step before is still being copied from.

A library that plans on the host writes its plan into pinned memory and starts an asynchronous copy. The host runs a
step ahead of the device: the copy may not have begun when the next step plans again into the same memory, and then the
device computes step N with the plan of step N + 1. Two sets cure that at the depth the engine works at, and an event
behind each set's copies cures it at any depth: a set is lent again only when the device has passed its event.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Generic, Protocol, TypeVar

Set = TypeVar("Set")


class Event(Protocol):
    """The part of `torch.cuda.Event` that is needed."""

    def record(self) -> None:
        """Behind everything queued on the current stream; recording again moves the event."""
        ...

    def synchronize(self) -> None:
        """The host waits until the device has passed the event."""
        ...


class ImmediateEvent:
    """For devices whose work is done when the call returns."""

    def record(self) -> None:
        return

    def synchronize(self) -> None:
        return


class AlternatingSets(Generic[Set]):
    """Lends `sets` in turn. A step is `begin`, then any number of writes into the set with copies queued behind them,
    then `Lease.seal`; more writes and copies may follow if `seal` comes again behind them.

    With as many sets as steps that the host may have submitted and not finished, `begin` never waits in practice.
    """

    def __init__(self, sets: Sequence[Set], make_event: Callable[[], Event]) -> None:
        if not sets:
            raise ValueError("AlternatingSets: at least one set is needed")
        self._leases = [Lease(each, make_event()) for each in sets]
        self._next = 0

    def begin(self) -> Lease[Set]:
        """The next set; every copy out of it is done. Waits where the device is that far behind."""
        lease = self._leases[self._next]
        self._next = (self._next + 1) % len(self._leases)
        lease.renew()
        return lease


class Lease(Generic[Set]):
    """A set for the time of a step: until `begin` comes round to it again."""

    def __init__(self, lent: Set, event: Event) -> None:
        self.set = lent
        self._event = event
        self._recorded = False
        self._sealed = True

    def renew(self) -> None:
        """Wait for the copies of the time before; called by `AlternatingSets`."""
        if not self._sealed:
            self.seal()  # that step failed half way; copies that it queued may still run
        if self._recorded:
            self._event.synchronize()
        self._sealed = False

    def seal(self) -> None:
        """Every copy out of the set is queued on the current stream."""
        self._event.record()
        self._recorded = self._sealed = True
