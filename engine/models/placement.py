"""Which rank has which expert, where experts are whole (`--enable-expert-parallel`). Torch-free."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

import msgspec

from engine.errors import ConfigError
from engine.models.json_file import read_json_object

_FILE_BYTES = 16 << 20
"""at most, of a placement's file"""


class ExpertPlacement(msgspec.Struct, frozen=True):
    """Each expert is whole in one rank; a rank computes what tokens ask of its own, and ranks add up."""

    ranks: tuple[tuple[int, ...], ...] = ()
    """of each layer, of each of its experts: the rank; empty for a layer that has none. (): every layer's are divided
    in their order, the first ranks have one more"""

    def own(self, layer: int, count: int, rank: int, size: int) -> tuple[int, ...]:
        """Of the layer's `count` experts those of one of `size` ranks, in ascending order."""
        if not self.ranks:
            each, more = divmod(count, size)
            first = rank * each + min(rank, more)
            return tuple(range(first, first + each + (rank < more)))
        return tuple(expert for expert, of in enumerate(self.ranks[layer]) if of == rank)

    def check(self, counts: list[int], size: int) -> None:
        """`counts`: experts of each layer. Raises ConfigError unless each expert has a rank, and each rank an expert
        in every layer that has some."""
        if not any(counts):
            raise ConfigError("enable_expert_parallel: the model has no experts; leave it out")
        if few := [count for count in counts if 0 < count < size]:
            raise ConfigError(f"enable_expert_parallel: {few[0]} experts are too few for {size} ranks")
        if not self.ranks:
            return
        if len(self.ranks) != len(counts):
            raise ConfigError(f"expert_placement is of {len(self.ranks)} layers, and the model has {len(counts)}")
        for layer, (count, ranks) in enumerate(zip(counts, self.ranks, strict=True)):
            if len(ranks) != count:
                raise ConfigError(f"expert_placement: layer {layer} has {count} experts, {len(ranks)} are placed")
            if count and set(ranks) != set(range(size)):
                raise ConfigError(
                    f"expert_placement: layer {layer} names the ranks {sorted(set(ranks))}; each of 0 to {size - 1} "
                    "must have an expert, and there are no others"
                )


def balanced(loads: Sequence[Sequence[int]], size: int) -> ExpertPlacement:
    """`loads`: of each layer, tokens that each of its experts was given.

    The busiest first, each expert goes to the rank that has least to do (Graham's LPT rule, 1969), of those that may
    have one more: of a layer's experts ranks have as many, or one more. Raises ConfigError where a layer has fewer."""
    ExpertPlacement().check([len(layer) for layer in loads], size)
    return ExpertPlacement(tuple(_balanced_layer(layer, size) for layer in loads))


def _balanced_layer(loads: Sequence[int], size: int) -> tuple[int, ...]:
    most, longer = divmod(len(loads), size)
    held, work, ranks = [0] * size, [0] * size, [0] * len(loads)
    for expert in sorted(range(len(loads)), key=lambda expert: (-loads[expert], expert)):
        full = most + (longer > 0)
        rank = min((rank for rank in range(size) if held[rank] < full), key=lambda rank: (work[rank], held[rank], rank))
        ranks[expert] = rank
        held[rank] += 1
        work[rank] += loads[expert]
        longer -= held[rank] > most
    return tuple(ranks)


def read_placement(file: str) -> ExpertPlacement:
    """What `write_placement` wrote. Raises ConfigError."""
    content = read_json_object(Path(file), _FILE_BYTES)
    try:
        return ExpertPlacement(msgspec.convert(content["layers"], tuple[tuple[int, ...], ...]))
    except (KeyError, msgspec.ValidationError):
        raise ConfigError(f'{file}: expected {{"layers": [[rank of each expert], ...]}}') from None


def write_placement(placement: ExpertPlacement, file: str) -> None:
    Path(file).write_text(json.dumps({"layers": placement.ranks}) + "\n")
