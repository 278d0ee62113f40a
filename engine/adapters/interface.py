"""What the scheduler needs of whoever loads adapters."""

from __future__ import annotations

from typing import Protocol

from engine.adapters.request import LoRARequest


class AdapterLoader(Protocol):
    @property
    def num_slots(self) -> int: ...

    @property
    def needs_rest(self) -> bool:
        """`load` waits for other ranks, so it is not to be called while a step is in flight."""
        ...

    def load(self, adapter: LoRARequest, slot: int) -> bool:
        """Begin to bring it into a slot that no row of a step in flight has. True: it is done; else the scheduler is
        told when it is."""
        ...

    def problem(self, adapter: LoRARequest) -> str | None:
        """Why loading it has failed, once it is done; None: it has not."""
        ...


class RanksAdapters(AdapterLoader, Protocol):
    """Of one rank."""

    def digest(self, adapter: LoRARequest) -> str:
        """Of the files of an adapter that has just been loaded, if ranks are to compare it; else empty."""
        ...

    def forget(self, adapter: LoRARequest) -> None:
        """What was kept of it is read anew."""
        ...
