"""What is known of each of those who share an engine."""

from __future__ import annotations


class Account:
    """Of a tenant. Only `FairQueue` changes it, and `RunningRows` its rows."""

    __slots__ = ("live", "name", "rows", "served", "weight")

    def __init__(self, name: str, weight: float) -> None:
        self.name, self.weight = name, weight
        self.served = 0.0
        """the virtual token counter: what was computed for it, over its weight"""
        self.live = 0
        """sequences that have not ended"""
        self.rows = 0
        """of those, how many run"""

    @property
    def share(self) -> float:
        return self.rows / self.weight
