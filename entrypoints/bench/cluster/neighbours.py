"""Devices of one machine: what they take from each other while they compute (memory, a clock, caches)."""

from __future__ import annotations

from collections.abc import Hashable


class Neighbours:
    def __init__(self, slower: float = 1.0) -> None:
        """`slower`: what a step takes while another device computes, over what it takes alone."""
        self._slower = slower
        self._until: dict[Hashable, float] = {}

    def begin(self, device: Hashable, at: float, seconds: float) -> float:
        """What a step takes that begins then, and would take so long alone. Who computes when it begins goes on; who
        begins later is slower because of it, and not the other way round."""
        if any(until > at for other, until in self._until.items() if other != device):
            seconds *= self._slower
        self._until[device] = at + seconds
        return seconds
