"""What records a device's work: the seam between graphs and CUDA, so that everything above it is proven on a CPU."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Protocol, TypeVar

T = TypeVar("T")


class Handle(Protocol):
    """One captured graph."""

    def replay(self) -> None:
        """Queue the recorded work again, on what its addresses hold then; does not wait for the device."""


class Capturer(Protocol):
    """Records what functions do to a device. All captures of one capturer take memory from one pool.

    Capturing computes nothing: results are tensors whose contents mean something only after a replay. Memory that is
    freed during or after a capture goes back to the pool, and the next capture takes it. This is why whoever owns
    several graphs of one pool replays them in an order in which no graph needs what another has overwritten since.
    """

    def session(self) -> AbstractContextManager[None]:
        """Around the warm-up and all captures of one program at one size."""

    def warm_up(self, function: Callable[[], object]) -> None:
        """Run `function` for real where captures will record it, so that what is loaded at first use is loaded."""

    def capture(self, function: Callable[[], T]) -> tuple[Handle, T]:
        """Record one call of `function`; its result's tensors own memory of the pool. An error of `function` is
        raised after recording was ended."""

    def memory_bytes(self) -> int:
        """Device memory that sessions have taken so far."""
