"""What the scheduler needs of whoever loads adapters."""

from __future__ import annotations

from typing import Protocol

from engine.adapters.request import LoRARequest


class AdapterLoader(Protocol):
    @property
    def num_slots(self) -> int: ...

    def load(self, adapter: LoRARequest, slot: int) -> bool:
        """Begin to bring it into a slot that no row of a step in flight has. True: it is done; else the scheduler is
        told when it is."""
        ...

    def problem(self, adapter: LoRARequest) -> str | None:
        """Why loading it has failed, once it is done; None: it has not."""
        ...
