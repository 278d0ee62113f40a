"""Experts that are divided over replicas: each computes attention for its own tokens, and its experts for everybody's.

In every layer with experts, ranks show each other the rows that their tokens have there and what the router chose for
each (a gather with as many rows of each rank as it has); every rank computes what rows ask of its own experts, and of
the sum each gets its own rows (`reduce_rows`). So all ranks take every step together, one that has no token, too: a
round, which begins with how many rows each will bring.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import nn

from engine.models.decoder import Decoder, DecoderLayer
from engine.models.device_packed import StoredExperts
from engine.models.experts import Experts
from engine.models.packed_experts import PackedExperts
from engine.models.spec import ExpertsSpec
from engine.parallel.group import RowsGroup
from engine.step import RoundStart

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


class _Layer(NamedTuple):
    part: Experts | PackedExperts | StoredExperts
    spec: ExpertsSpec
    hidden: int
    loads: torch.Tensor
    """int64 [experts]: own tokens that each was given"""


class ExpertExchange:
    """Of one rank. Layers are those of the whole model, by their numbers."""

    def __init__(self, group: RowsGroup, dtype: torch.dtype, num_layers: int) -> None:
        self._group, self._dtype, self._num_layers = group, dtype, num_layers
        self._layers: dict[int, _Layer] = {}
        self._rows = [0] * group.size
        """of each rank, in this round"""
        self._counts = False
        """what is chosen in this round"""

    def add(self, layer: int, part: Experts | PackedExperts | StoredExperts, spec: ExpertsSpec, hidden: int) -> None:
        """`part`: this rank's own of a layer's experts."""
        self._layers[layer] = _Layer(part, spec, hidden, torch.zeros(spec.count, dtype=torch.int64))

    def activation_bytes(self, max_tokens: int) -> int:
        """What a step needs for the rows of all ranks, `max_tokens` of each, in the layer that needs most: the rows and
        what was chosen for them, and what experts make of them."""
        of_a_row = 0
        for _, spec, hidden, _ in self._layers.values():
            choice = 16 + 4 * (3 * spec.inner_size + hidden)
            of_a_row = max(of_a_row, 2 * hidden * self._dtype.itemsize + spec.router.top_k * choice)
        return self._group.size * max_tokens * of_a_row

    def begin(self, start: RoundStart, rows: int) -> int | None:
        """A step of `rows` own tokens begins, at all ranks; without any, this rank's part in it is over when this
        returns. → as `StepResult.quiet`. RuntimeError where a rank has gone."""
        group = self._group
        mine = torch.tensor([[rows, start.busy, start.wake]])
        everyones = group.all_gather(mine, [3] * group.size, group.name).view(group.size, 3)
        self._rows = everyones[:, 0].tolist()
        self._counts = start.wake > 0  # before the first one nobody has sent a request
        busy, wakes = everyones[:, 1].tolist(), set(everyones[:, 2].tolist())
        if not rows:
            for number, layer in self._layers.items():
                empty = torch.empty(0, layer.hidden, dtype=self._dtype)
                choices = torch.empty(0, layer.spec.router.top_k)
                self.compute(empty, choices.int(), choices, None, number)
        return None if any(busy) or any(self._rows) or len(wakes) > 1 else wakes.pop()

    def compute(
        self, x: torch.Tensor, ids: torch.Tensor, factors: torch.Tensor, residual: torch.Tensor | None, layer: int
    ) -> torch.Tensor:
        """See `engine.models.experts.Experts`; of all ranks' experts, for this rank's rows."""
        group, rows, own = self._group, self._rows, self._layers[layer]
        if not any(rows):
            return x
        if self._counts:
            own.loads.add_(torch.bincount(ids.flatten(), minlength=own.loads.size(0)))
        everyones = self._gather(x)
        choices = self._gather(torch.cat((ids, factors.view(torch.int32)), dim=1))
        all_ids, all_factors = (part.contiguous() for part in choices.chunk(2, dim=1))
        y = own.part(everyones, all_ids, all_factors.view(torch.float32))
        return group.reduce_rows(y, rows, residual, y.dtype, group.name)

    def _gather(self, x: torch.Tensor) -> torch.Tensor:
        """[own rows, columns] of each rank, one after another: as one long row each."""
        columns, group = x.size(1), self._group
        flat = group.all_gather(x.reshape(1, -1), [rows * columns for rows in self._rows], group.name)
        return flat.view(-1, columns)

    def loads(self) -> list[list[int]]:
        """Of each layer and expert: how many of this rank's tokens it was given since the start; [] of a layer that has
        none."""
        given = {number: layer.loads.tolist() for number, layer in self._layers.items()}
        return [given.get(number, []) for number in range(self._num_layers)]


Exchange = Callable[[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor | None, int], torch.Tensor]


class DividedExperts(nn.Module):
    """Of all ranks together: see `engine.models.experts.Experts`."""

    def __init__(self, part: Experts | PackedExperts | StoredExperts, exchange: Exchange, layer: int) -> None:
        super().__init__()
        self.part = part
        self._exchange, self._layer = exchange, layer

    def forward(
        self, x: torch.Tensor, ids: torch.Tensor, factors: torch.Tensor, residual: torch.Tensor | None = None
    ) -> torch.Tensor:
        compute = divided_experts if torch.compiler.is_dynamo_compiling() else self._exchange
        return compute(x, ids, factors, residual, self._layer)


def join_experts(model: Decoder, exchange: ExpertExchange) -> None:
    """Put into `model`, which has its own experts alone, what brings ranks together."""
    for index, (layer, spec) in enumerate(zip(model.layers, model.spec.layers, strict=True)):
        assert isinstance(layer, DecoderLayer)
        if layer.experts is not None and spec.experts is not None:
            exchange.add(index, layer.experts, spec.experts, model.spec.hidden_size)
            setattr(layer, "experts", DividedExperts(layer.experts, exchange.compute, index))  # noqa: B010  # another type
