"""Experts that are divided over replicas: each computes attention for its own tokens, and its experts for everybody's.

In every layer with experts, ranks show each other the rows that their tokens have there and what the router chose for
each (gathers with as many rows of each rank as it has); every rank computes what rows ask of its own experts, and shows
what it made of each choice. Where a token is at home, its choices are weighted and added up, in their order, as one
process does that has all experts: bits do not depend on who has which. So all ranks take every step together, one that
has no token, too: a round, which begins with how many rows each will bring.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import nn

from engine.models.decoder import Decoder
from engine.models.decoder_layer import DecoderLayer
from engine.models.device_packed import StoredExperts
from engine.models.expert_moves import DividedLayer, ExpertMoves
from engine.models.experts import Experts
from engine.models.packed_experts import PackedExperts
from engine.models.placement import ExpertPlacement
from engine.models.spec import ExpertsSpec
from engine.parallel.group import Group
from engine.parallel_config import EplbConfig
from engine.step import RoundEnd, RoundStart

EXCHANGE_OP = "pageloom::divided_experts"


@torch.library.custom_op(EXCHANGE_OP, mutates_args=())
def divided_experts(
    x: torch.Tensor, ids: torch.Tensor, factors: torch.Tensor, residual: torch.Tensor | None, layer: int
) -> torch.Tensor:
    """A marker at which traced graphs are split: pieces see their own rows only."""
    raise RuntimeError(f"{EXCHANGE_OP} is a marker; it must be bound to an exchange before it runs")


@divided_experts.register_fake
def _(
    x: torch.Tensor, ids: torch.Tensor, factors: torch.Tensor, residual: torch.Tensor | None, layer: int
) -> torch.Tensor:
    return torch.empty_like(x)


class ExpertExchange:
    """Of one rank. Layers are those of the whole model, by their numbers."""

    def __init__(self, group: Group, dtype: torch.dtype, num_layers: int) -> None:
        self._group, self._dtype, self._num_layers = group, dtype, num_layers
        self._layers: dict[int, DividedLayer] = {}
        self._moves: ExpertMoves | None = None
        self._quiet: int | None = None
        self._computed = self._came = 0
        """in this round: choices that own experts computed, and experts that moved here"""
        self._rows = [0] * group.size
        """of each rank, in this round"""
        self._counts = False
        """what is chosen in this round"""

    def add(self, layer: int, part: Experts | PackedExperts, spec: ExpertsSpec, hidden: int, ranks: list[int]) -> None:
        """`part`: this rank's own of a layer's experts; `ranks`: who has each."""
        loads = torch.zeros(spec.count, dtype=torch.int64)
        self._layers[layer] = DividedLayer(part, spec, hidden, torch.tensor(ranks), loads)

    def move(self, config: EplbConfig) -> None:
        """Experts are to move from now on; all layers have been added."""
        self._moves = ExpertMoves(config, self._group, self._layers)

    def begin(self, start: RoundStart, rows: int) -> None:
        """A step of `rows` own tokens begins, at all ranks; without any, this rank's part in it is over when this
        returns. RuntimeError where a rank has gone."""
        group = self._group
        mine = torch.tensor([[rows, start.busy, start.wake]])
        everyones = group.all_gather(mine, [3] * group.size, group.name).view(group.size, 3)
        self._rows = everyones[:, 0].tolist()
        busy, wakes = everyones[:, 1].tolist(), set(everyones[:, 2].tolist())
        self._counts = any(wakes)  # before the first one nobody has sent a request
        self._quiet = None if any(busy) or any(self._rows) or len(wakes) > 1 else wakes.pop()
        self._computed = self._came = 0
        if self._moves is not None and self._counts and any(self._rows):
            self._came = self._moves.step()
        if not rows:
            for number, layer in self._layers.items():
                empty = torch.empty(0, layer.hidden, dtype=self._dtype)
                choices = torch.empty(0, layer.spec.router.top_k)
                self.compute(empty, choices.int(), choices, None, number)

    def end(self) -> RoundEnd:
        """Of the step that began last, once it is computed."""
        return RoundEnd(self._quiet, self._computed, self._came)

    def compute(
        self, x: torch.Tensor, ids: torch.Tensor, factors: torch.Tensor, residual: torch.Tensor | None, layer: int
    ) -> torch.Tensor:
        """See `engine.models.experts.Experts`; of all ranks' experts, for this rank's rows."""
        rank, size, own = self._group.rank, self._group.size, self._layers[layer]
        if not any(self._rows):
            return x
        everyones, chosen = self._gather(x, self._rows), self._gather(ids, self._rows).flatten()
        holders, top_k = own.ranks[chosen], ids.size(1)
        by_holder = torch.argsort(holders, stable=True)
        counts = torch.bincount(holders, minlength=size).tolist()
        mine = _part_of(by_holder, counts, rank)
        if self._counts:
            own.loads.add_(torch.bincount(chosen, minlength=own.loads.size(0)))
            self._computed += len(mine)
        made = own.part(everyones[mine // top_k], chosen[mine, None], torch.ones(len(mine), 1))
        positions = torch.empty(len(chosen), dtype=torch.int32)
        positions[by_holder] = torch.arange(len(chosen), dtype=torch.int32)
        at_home = _part_of(positions.view(-1, top_k), self._rows, rank)
        return own.part.combined(self._gather(made, counts), at_home, factors, residual)

    def _gather(self, x: torch.Tensor, rows: Sequence[int]) -> torch.Tensor:
        """[rows[rank], columns] of each rank, one after another: as one long row each."""
        columns, group = x.size(1), self._group
        flat = group.all_gather(x.reshape(1, -1), [each * columns for each in rows], group.name)
        return flat.view(-1, columns)

    def loads(self) -> list[list[int]]:
        """Of each layer and expert: how many tokens of all ranks it was given since the start; [] of a layer that has
        none. The same at every rank that has taken the same rounds."""
        given = {number: layer.loads.tolist() for number, layer in self._layers.items()}
        return [given.get(number, []) for number in range(self._num_layers)]


def _part_of(x: torch.Tensor, rows: Sequence[int], rank: int) -> torch.Tensor:
    """Of what has `rows[rank]` rows of each rank, one after another."""
    first = sum(rows[:rank])
    return x[first : first + rows[rank]]


Exchange = Callable[[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor | None, int], torch.Tensor]


class DividedExperts(nn.Module):
    """Of all ranks together: see `engine.models.experts.Experts`."""

    def __init__(self, part: Experts | PackedExperts, exchange: Exchange, layer: int) -> None:
        super().__init__()
        self.part = part
        self._exchange, self._layer = exchange, layer

    def forward(
        self, x: torch.Tensor, ids: torch.Tensor, factors: torch.Tensor, residual: torch.Tensor | None = None
    ) -> torch.Tensor:
        compute = divided_experts if torch.compiler.is_dynamo_compiling() else self._exchange
        return compute(x, ids, factors, residual, self._layer)


def join_experts(model: Decoder, exchange: ExpertExchange, placement: ExpertPlacement, size: int) -> None:
    """Put into `model`, which has its own experts alone, what brings `size` ranks together."""
    for index, (layer, spec) in enumerate(zip(model.layers, model.spec.layers, strict=True)):
        assert isinstance(layer, DecoderLayer)
        if layer.experts is not None and spec.experts is not None:
            assert not isinstance(layer.experts, StoredExperts)  # of GPUs, which resolving refuses
            ranks = placement.ranks_of(index, spec.experts.count, size)
            exchange.add(index, layer.experts, spec.experts, model.spec.hidden_size, list(ranks))
            setattr(layer, "experts", DividedExperts(layer.experts, exchange.compute, index))  # noqa: B010  # another type
