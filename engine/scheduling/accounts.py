"""What is known of each of those who share an engine."""

from __future__ import annotations


class Account:
    """Of a tenant. Only `FairQueue` changes it, and `RunningRows` its rows."""

    __slots__ = ("credit", "level", "live", "name", "rows", "served", "weight")

    def __init__(self, name: str, weight: float) -> None:
        self.name, self.weight = name, weight
        self.served = 0.0
        """the virtual token counter: what was computed for it, over its weight"""
        self.level, self.credit = 0.0, 0.0
        """where the counter was raised to when it came back; by how much more it may be served before it waits"""
        self.live = 0
        """sequences that have not ended"""
        self.rows = 0
        """of those, how many run"""

    @property
    def order(self) -> tuple[float, bool]:
        """Who is lower is served first. It only grows."""
        if self.served <= self.level + self.credit:
            return self.level, False
        return self.served, True

    @property
    def share(self) -> float:
        return self.rows / self.weight
