"""Experts that move between replicas while they serve, so that each has as much to do (vLLM's EPLB).

All ranks count the same choices, so all find the same exchanges of experts between two ranks (`placement.exchanges`),
and take them in the same rounds, some MiB a round: before a round computes, the two show each other the packed weights
of their experts, which take each other's place, and everybody's maps change. Nothing is read or packed again, and
whatever carries the ranks' rows carries weights. One that dies meanwhile ends as in any other collective.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping
from typing import NamedTuple

import torch

from engine.models.experts import Experts
from engine.models.packed_experts import PackedExperts
from engine.models.placement import ExpertPlacement, exchanges, imbalance
from engine.models.spec import ExpertsSpec
from engine.parallel.group import Group
from engine.parallel_config import EplbConfig

logger = logging.getLogger(__name__)

_ROUND_BYTES = 16 << 20
"""of weights that are shown in a round: no more than this, or one exchange"""


class DividedLayer(NamedTuple):
    part: Experts | PackedExperts
    """this rank's own of the layer's experts"""
    spec: ExpertsSpec
    hidden: int
    ranks: torch.Tensor
    """int64 [experts]: who has each"""
    loads: torch.Tensor
    """int64 [experts]: tokens of all ranks that each was given"""

    @property
    def stacks(self) -> list[torch.Tensor]:
        """[own experts, ...] each"""
        part = self.part
        stacks = (part.gate_up, part.down, part.gate_up_bias, part.down_bias)
        return [stack for stack in stacks if stack is not None]


class ExpertMoves:
    """Of one rank. `layers`: those with experts, in an order that all ranks have."""

    def __init__(self, config: EplbConfig, group: Group, layers: Mapping[int, DividedLayer]) -> None:
        self._config, self._group, self._layers = config, group, layers
        self._rounds = 0
        self._before = self._loads()
        """what had been counted when the window began"""
        self._pending: Iterator[tuple[int, int, int]] = iter(())
        """layer, and two of its experts that are to take each other's place"""

    def step(self) -> int:
        """A round begins in which somebody computes. → experts that came to this rank. RuntimeError where a rank has
        gone."""
        self._rounds += 1
        interval = self._config.step_interval
        if self._rounds % interval == 0:
            self._plan()
        if (self._rounds + self._config.window_size) % interval == 0:
            self._before = self._loads()
        came, shown = 0, 0
        while shown < _ROUND_BYTES and (move := next(self._pending, None)) is not None:
            layer, first, second = move
            shown += sum(2 * stack[0].nbytes for stack in self._layers[layer].stacks)
            came += self._exchange(self._layers[layer], first, second)
        return came

    def _plan(self) -> None:
        window = {number: loads - self._before[number] for number, loads in self._loads().items()}
        if self._config.log_balancedness and self._group.rank == 0:
            placement = ExpertPlacement(tuple(tuple(layer.ranks.tolist()) for layer in self._layers.values()))
            found = 1 / imbalance(placement, [loads.tolist() for loads in window.values()], self._group.size)
            logger.info(
                "expert balancedness (mean of replicas over the busiest) of %d steps: %.3f",
                self._config.window_size,
                found,
            )
        self._pending = self._moves(window)

    def _moves(self, window: Mapping[int, torch.Tensor]) -> Iterator[tuple[int, int, int]]:
        """A layer's are found when those before it have been taken."""
        for number, loads in window.items():
            for pair in exchanges(self._layers[number].ranks.tolist(), loads.tolist(), self._group.size):
                yield (number, *pair)

    def _exchange(self, layer: DividedLayer, first: int, second: int) -> int:
        group, places = self._group, layer.part.places
        assert places is not None
        holders = layer.ranks[[first, second]].tolist()
        layer.ranks[[first, second]] = layer.ranks[[second, first]]
        if group.rank not in holders:
            for stack in layer.stacks:
                self._show(torch.empty(0, dtype=torch.uint8), holders, stack[0].nbytes)
            return 0
        goes, comes = (first, second) if group.rank == holders[0] else (second, first)
        other = sum(holders) - group.rank
        for stack in layer.stacks:
            own = stack[int(places[goes])]
            shown = self._show(own.view(torch.uint8).flatten(), holders, own.nbytes)
            own.copy_(shown[int(other > group.rank)].view(own.dtype).view(own.shape))
        places[comes], places[goes] = places[goes].clone(), -1
        return 1

    def _show(self, own: torch.Tensor, holders: list[int], size: int) -> torch.Tensor:
        """uint8 [2, size], in the order of ranks."""
        group = self._group
        columns = [size if rank in holders else 0 for rank in range(group.size)]
        return group.all_gather(own[None], columns, group.name).view(2, size)

    def _loads(self) -> dict[int, torch.Tensor]:
        return {number: layer.loads.clone() for number, layer in self._layers.items()}
