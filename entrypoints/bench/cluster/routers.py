"""Routers by name, to be compared."""

from __future__ import annotations

import itertools
from collections.abc import Callable

from engine.core.wire import AddRequest
from engine.replicas.router import Place, Router


class TakingTurns(Router):
    """Every replica in turn, whatever it has."""

    def __init__(self, block_size: int) -> None:
        super().__init__(block_size)
        self._turn = itertools.count()

    def places(self, request: AddRequest) -> list[Place]:
        places = sorted(super().places(request), key=lambda place: place.replica)
        first = next(self._turn) % max(len(places), 1)
        return [*places[first:], *places[:first]]


ROUTERS: dict[str, Callable[[int], Router]] = {"work": Router, "turns": TakingTurns}
"""called with the block size"""
